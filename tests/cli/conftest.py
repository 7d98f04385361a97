"""One comparison that many tests look at: fp32 with three seeds, a run that matches, and one whose loss is too high."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from comparison import Compared

from lightning_mp.cli import main

sys.path.append(str(Path(__file__).parents[1] / "report"))
from wandb_file import isolate


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    root = tmp_path_factory.mktemp("with a space and ü")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        isolate(patch, root)
        patch.chdir(Path(__file__).parent)
        patch.setattr(sys, "path", list(sys.path))
        (root / "elsewhere").mkdir()
        (root / "runs").symlink_to(root / "elsewhere")
        status = main(
            [
                "compare", "-c", "toy.yaml", f"--output-dir={root / 'runs'}", "--precisions=bf16-master,bf16-true,32-true",
                "--seeds=3", "--require=all", "--model.drift_in=bf16-true", "--trainer.max_steps=25",
                "--trainer.callbacks+=lightning_mp.MemoryMonitor",
                "--trainer.callbacks+=lightning_mp.DivergenceMonitor", "--trainer.callbacks.baseline=absent.json",
            ]
        )  # fmt: skip
    (folder,) = (root / "elsewhere").iterdir()
    return Compared(status, folder, out.getvalue(), err.getvalue())
