"""What every user of KeOps needs before its first formula."""

from __future__ import annotations

from solvers.common.keops_runtime import drop_cut_off_caches


def test_index_files_that_a_kill_cut_off_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("KEOPS_CACHE_FOLDER", str(tmp_path))
    build = tmp_path / "Linux"
    build.mkdir()
    empty, whole, other = (build / name for name in ("a_cache.pkl", "b_cache.pkl", "formula.so"))
    empty.touch()
    whole.write_bytes(b"kept")
    other.touch()
    drop_cut_off_caches()
    assert not empty.exists() and whole.exists() and other.exists()
    drop_cut_off_caches()
