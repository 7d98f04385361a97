"""Files are whole or absent."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from lightning_mp import files


def test_json_has_no_nan_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    files.write_json(path, {"a": [float("nan"), float("inf"), 1.5, None, "s"], "b": (1,), 3: True})
    assert json.loads(path.read_text()) == {"a": [None, None, 1.5, None, "s"], "b": [1], "3": True}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    files.write_text(path, "old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    files.write_text(tmp_path / "x.txt", "")
    (tmp_path / "plain").write_text("")
    assert stat.S_IMODE((tmp_path / "x.txt").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
