"""The main job at full size, through the command line: masters converge as fp32 does, and their lack shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # two minutes
def test_masters_converge_as_fp32_does_and_bf16_without_masters_does_not(tmp_path):
    command = [sys.executable, "-m", "lightning_mp", "compare", "-c", "configs/byte_gpt.yaml", "--wandb", "disabled"]
    precisions = ["32-true", "bf16-true", "bf16-master"]
    command += ["--precisions", ",".join(precisions), "--output-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (file,) = tmp_path.glob("*/comparison.json")
    losses = {}
    for precision in precisions:
        steps = json.loads((file.parent / precision / "curve.json").read_text())["steps"]
        assert len(steps) == 150
        losses[precision] = sum(step["loss"] for step in steps[-30:]) / 30
    assert abs(losses["bf16-master"] - losses["32-true"]) <= 0.002
    assert losses["bf16-true"] - losses["32-true"] > 0.05
