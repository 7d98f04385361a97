"""Folders belong to one run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_mp.report import files


def test_runs_started_in_the_same_second_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: files.new_run_folder(tmp_path / "runs", "compare"), range(16)))
    assert len(set(folders)) == 16
    assert all(folder.is_dir() and folder.name.startswith("compare-") for folder in folders)
