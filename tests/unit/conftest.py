"""Fixtures of the unit tests."""

from __future__ import annotations

import gc
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or no test could interrupt anything


@pytest.fixture(scope="module", autouse=True)
def keep_what_is_imported():
    """Out of sight of the garbage collector: a cell collects between its steps, and would walk through all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every device that tests of a solver's own API run on."""
    if request.param == "cuda":
        import torch  # here: most unit tests need no framework

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    return request.param


@pytest.fixture
def no_pixels(monkeypatch):
    """Figures are drawn, and their files named: writing pixels takes seconds, and `test_report_figures` tests it."""

    def save(figure, out_dir, stem):
        figure.draw_without_rendering()
        out_dir.mkdir(parents=True, exist_ok=True)
        paths = [out_dir / f"{stem}.png", out_dir / f"{stem}.svg"]
        for path in paths:
            path.write_text(stem)
        return paths

    monkeypatch.setattr("fsbench.report.figures.save", save)


@pytest.fixture
def fake_workers(monkeypatch):
    """Workers whose measurement is that of `fakes`."""
    from fakes import WORKER

    from fsbench import process
    from fsbench.env import code_id

    monkeypatch.setattr(process, "WORKER", WORKER)
    code_id.cache_clear()  # other processes of a test hash the files as they are now


@pytest.fixture
def out(tmp_path):
    """The out_dir of a run."""
    return tmp_path / "out"
