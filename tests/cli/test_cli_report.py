"""`lightning-mp report`, from the command line to the page, of what a real comparison left behind."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison import Compared

from lightning_mp.cli import main
from lightning_mp.numerics.baseline import Baseline, read_baseline, write_baseline
from lightning_mp.numerics.curve import LossCurve


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Report into a file in a folder that does not exist yet, and return the words of the page."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> str:
        path = tmp_path / "new" / "folder ü" / "page.html"
        capsys.readouterr()
        assert main(["report", *map(str, args), "-o", str(path)]) == 0
        printed = capsys.readouterr()
        assert printed.out == f"Report: {path}\n"
        return words(path)

    return call


def words(page: Path) -> str:
    """The text of a page, without its pictures."""
    text = re.sub(r"<(svg|style|details)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


@pytest.fixture
def copied(compared: Compared, tmp_path: Path) -> Path:
    """The comparison's folder, in another place."""
    folder = tmp_path / "moved"
    shutil.copytree(compared.folder, folder)
    return folder


def rewrite(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "comparison.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_a_comparison_gives_the_page_that_it_got_when_it_was_run(report: Callable[..., str], compared: Compared) -> None:
    page, own = report(compared.folder), words(compared.folder / "report.html")
    dated = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
    assert dated.sub("", page.split("To repeat it:")[0]) == dated.sub("", own.split("To repeat it:")[0])
    assert "bf16-true diverged from 32-true. bf16-master matches 32-true." in page
    assert "lightning-mp report" in page.split("To repeat it:")[1]
    assert "lightning-mp compare -c toy.yaml" in own.split("To repeat it:")[1]


def test_without_a_name_the_page_is_in_the_current_folder(
    compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(compared.folder / "comparison.json")]) == 0
    assert capsys.readouterr().out == "Report: report.html\n"
    assert "bf16-master matches 32-true." in words(tmp_path / "report.html")


def test_a_csv_folder_an_offline_run_and_a_baseline_are_runs(report: Callable[..., str], compared: Compared) -> None:
    page = report(compared.folder / "bf16-master" / "metrics")
    assert "bf16-master/metrics was not judged." in page
    assert "tokens per second" in page
    (offline,) = compared.folder.glob("bf16-true/wandb/offline-run-*")
    assert "bf16-true diverged from the baseline." in report(offline)
    assert "32-true is the only run, so there is nothing to compare it with." in report(
        compared.folder / "32-true" / "baseline.json"
    )


def test_sources_of_all_kinds_can_be_mixed_and_one_of_them_is_the_reference(
    report: Callable[..., str], compared: Compared
) -> None:
    (offline,) = compared.folder.glob("bf16-true/wandb/offline-run-*")
    csv, seed = compared.folder / "bf16-master" / "metrics", compared.folder / "32-true-seed7" / "baseline.json"
    page = report(compared.folder, csv, offline, seed, "--reference", "32-true-seed7")
    assert "compared with 32-true-seed7" in page
    assert "each with its ratio to 32-true-seed7" in page
    for name in ("32-true", "bf16-master", "bf16-master/metrics", "bf16-true"):
        assert f" {name} " in page


def test_a_given_baseline_judges_every_run_anew(report: Callable[..., str], compared: Compared, tmp_path: Path) -> None:
    (run,) = read_baseline(compared.folder / "32-true" / "baseline.json").runs
    curve, samples, tokens = LossCurve(), run.curve.samples or [], run.curve.tokens or []
    for step, loss, sample, token in zip(run.curve.steps, run.curve.losses, samples, tokens, strict=True):
        curve.add(step, (loss or 0.0) + 0.5, sample, token)
    higher = tmp_path / "higher.json"
    write_baseline(higher, Baseline((replace(run, curve=curve),), str(higher)))
    page = report(compared.folder, "--baseline", higher)
    assert "32-true and bf16-master have a lower loss than the baseline." in page
    assert f"judged by {higher}" in page


def test_force_judges_what_could_not_be_compared(report: Callable[..., str], copied: Path) -> None:
    def forbid(content: dict[str, Any]) -> None:
        for result in content["results"][1:]:
            result["verdict"]["status"] = "NOT COMPARABLE"

    rewrite(copied, forbid)
    assert "bf16-master and bf16-true cannot be compared with 32-true." in report(copied)
    assert "bf16-true diverged from 32-true. bf16-master matches 32-true." in report(copied, "--force")


def test_a_folder_may_be_moved(report: Callable[..., str], compared: Compared, copied: Path) -> None:
    rewrite(copied, lambda content: content.update(baselines=["/no/longer/there/baseline.json"] * 3))
    dated = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
    page, own = report(copied).split("To repeat it:")[0], report(compared.folder).split("To repeat it:")[0]
    assert dated.sub("", page) == dated.sub("", own)


def test_a_comparison_that_still_runs_tells_what_it_has(report: Callable[..., str], copied: Path) -> None:
    rewrite(copied, lambda content: content.update(status="running", results=content["results"][:2]))
    shutil.rmtree(copied / "bf16-true")
    page = report(copied)
    assert "bf16-true did not finish. bf16-master matches 32-true." in page
    assert "The run did not finish: the comparison ended, or still goes on, before it was run." in page


def test_a_comparison_from_before_there_were_verdicts_is_judged_by_its_curves(report: Callable[..., str], copied: Path) -> None:
    def age(content: dict[str, Any]) -> None:
        for name in ("seeds", "baselines", "required", "seed_results"):
            del content[name]
        for result in content["results"]:
            for name in ("verdict", "blocks", "memory_gib", "exponents", "updates_lost_fraction", "peak_gib", "peak_label"):
                result.pop(name, None)

    rewrite(copied, age)
    for file in [*copied.rglob("verdict.json"), *copied.rglob("baseline.json"), *copied.rglob("metrics.csv")]:
        file.unlink()
    assert "bf16-true diverged from 32-true. bf16-master matches 32-true." in report(copied)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["absent"], ["absent", "no such file or folder"]),
        (["FOLDER", "absent.csv"], ["absent.csv", "no such file or folder"]),
        (["."], ["no saved run", "comparison.json"]),
        (["FOLDER", "--reference=bf17"], ["'bf17'", "'32-true', 'bf16-master', 'bf16-true'"]),
        (["FOLDER", "--baseline=absent.json"], ["--baseline", "absent.json", "no such file"]),
        (["FOLDER", "--baseline=FOLDER/config.yaml"], ["--baseline", "config.yaml", "not valid JSON"]),
        (["FOLDER", "--baseline=BASELINE", "--baseline=BASELINE"], ["--baseline", "baseline.json"]),
        (["FOLDER", "-o", "."], ["-o", "is a folder", "report.html"]),
        (["FOLDER", "-o", ""], ["-o", "is a folder", "report.html"]),
        (["FOLDER", "-o", "FOLDER/config.yaml/page.html"], ["-o", "page.html", "within the file", "config.yaml"]),
        ([], ["RUN"]),
        (["FOLDER", "--nonsense"], ["--nonsense"]),
    ],
)
def test_bad_input_is_one_clear_line(
    compared: Compared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"FOLDER": str(compared.folder), "BASELINE": str(compared.folder / "32-true" / "baseline.json")}
    filled = [re.sub("FOLDER|BASELINE", lambda found: places[found.group()], arg) for arg in args]
    try:
        status = main(["report", *filled])
    except SystemExit as stopped:  # argparse's
        status = int(stopped.code or 0)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    *usage, line = printed.err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    assert all(word in line for word in words), line
    assert not list(tmp_path.rglob("*.html"))


def test_a_page_of_saved_runs_needs_no_wandb_and_prints_nothing_else(compared: Compared, tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_mp.cli import main; status = main(sys.argv[1:]);"
        "assert 'wandb' not in sys.modules, 'wandb was imported'; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "report", str(compared.folder), "-o", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
