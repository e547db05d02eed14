"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every device that tests of a solver's own API run on."""
    if request.param == "cuda":
        import torch  # here: most unit tests need no framework

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    return request.param
