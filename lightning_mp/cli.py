"""The command line: `lightning-mp fit | validate | test | predict | compare | report`.

The first four are LightningCLI over `lightning_mp.Trainer`, with any importable model and data module; classes are also
found in the current directory. What is different from stock LightningCLI:

- `trainer.precision_plugin` takes a name (`bf16-master`) or a class with its settings::

      trainer:
        precision: null            # leave it null: one of the two keys decides the precision, never both
        precision_plugin:
          class_path: lightning_mp.MasterWeightPrecision
          init_args: {precision: bf16-master, master: split}

- Each run's configuration goes to that run's own folder and never replaces another. Stock LightningCLI writes it to a
  folder that runs share under Weights & Biases, and there the second run aborts.
- With `--ckpt_path FILE`, hyperparameters in the checkpoint fill in model arguments that were not given. Stock
  LightningCLI lets them replace what the user gave, and stops at one that the model does not have.

`compare` trains one configuration under several precisions, judges each against fp32, and prints what each cost; see
`report.compare`. `report` makes a page of saved runs; see `report.saved.sources`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console

import lightning_mp
from lightning_mp.callbacks.publish import Monitor
from lightning_mp.files import write_text
from lightning_mp.numerics.baseline import Baseline, BaselineError, join_baselines, read_baseline
from lightning_mp.numerics.divergence import DivergenceTest
from lightning_mp.numerics.loss_scale import LossScale
from lightning_mp.report.candidates import CANDIDATES, DEFAULT, FP16, REFERENCE, SLOW_FP16, parse_precisions
from lightning_mp.report.compare import Plan, run_comparison
from lightning_mp.report.files import new_run_folder
from lightning_mp.report.results import INTERRUPTED, OK, Comparison, Result
from lightning_mp.report.table import WIDTH, comparison_table, reading_help
from lightning_mp.report.wandb import MODES, Mode, log_pictures
from lightning_mp.report.worker import EventWriter, WorkerReport, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT_FILE = "report.html"
BAD_INPUT = 2  # exit status, as argparse uses it


class UsageError(Exception):
    """A mistake in what the user asked for: shown as one line, not as a traceback."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 a comparison failed, 2 bad input.

    Args:
        args: what would stand behind `lightning-mp`; `sys.argv` by default.
    """
    args = list(sys.argv[1:] if args is None else args)
    # a console script has its own folder there; the user's classes lie where the user is
    if os.getcwd() not in sys.path[:1]:
        sys.path.insert(0, os.getcwd())
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_HELP)
        elif args[0] == "--version":
            print(f"lightning-mp {lightning_mp.__version__}")
        elif args[0] == "compare":
            return _compare(args[1:])
        elif args[0] == "report":
            return _report(args[1:])
        elif args[0] == _WORKER:
            return _work(args[1])
        elif args[0] in MixedPrecisionCLI.subcommands() or args[0].startswith("-"):
            MixedPrecisionCLI(args)
        else:
            known = ", ".join([*MixedPrecisionCLI.subcommands(), "compare", "report"])
            raise UsageError(f"unknown command {args[0]!r}. Known commands: {known}.")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


_WORKER = "_compare-worker"
_HELP = """usage: lightning-mp {fit,validate,test,predict,compare,report} [-h] ...

  fit, validate, test, predict   one run, as in LightningCLI: --config FILE, --model, --data, --trainer.* ...
  compare                        train one configuration under several precisions and print what each cost
  report                         make a page of saved runs

Try: lightning-mp fit --help, or lightning-mp compare --help."""


class RunConfigCallback(SaveConfigCallback):
    """Saves the run's configuration in the run's own folder, beside any that are there already."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write `config.yaml`, or `config-2.yaml` and so on where a run before this one used the same folder."""
        folder = _run_folder(trainer)
        filesystem = get_filesystem(folder)
        filesystem.makedirs(folder, exist_ok=True)
        stem, suffix = os.path.splitext(self.config_filename)
        path, number = os.path.join(folder, self.config_filename), 1
        while filesystem.isfile(path):
            number += 1
            path = os.path.join(folder, f"{stem}-{number}{suffix}")
        self.parser.save(self.config, path, skip_none=False, overwrite=False, multifile=False)
        rank_zero_info(f"Configuration of this run: {path}")


def _run_folder(trainer: Trainer) -> str:
    """The folder that belongs to this run alone; a run without a logger has none, so it gets one."""
    logger = trainer.logger
    if logger is not None and logger.log_dir is not None:
        return str(logger.log_dir)
    root = str((logger and logger.save_dir) or trainer.default_root_dir)
    if logger is not None and logger.version is not None:  # Weights & Biases: the run's id
        return os.path.join(root, str(logger.name), str(logger.version))
    return os.path.join(root, "run_configs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


class MixedPrecisionCLI(LightningCLI):
    """LightningCLI over `lightning_mp.Trainer`; the module's docstring says what is different.

    Args:
        args: the command line, subcommand first.
        kwargs: further arguments for LightningCLI.
    """

    def __init__(self, args: list[str], **kwargs: Any) -> None:
        self._precision_error: UsageError | None = None
        parser_kwargs = {"prog": "lightning-mp", **kwargs.pop("parser_kwargs", {})}
        super().__init__(
            **{
                "trainer_class": lightning_mp.Trainer,
                "subclass_mode_model": True,
                "subclass_mode_data": True,
                "save_config_callback": RunConfigCallback,
                "save_config_kwargs": {"save_to_log_dir": False},
                "parser_kwargs": parser_kwargs,
                "args": args,
                **kwargs,
            }
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--monitors.*`: the usual monitors, which every `fit` has unless they are switched off."""
        parser.add_function_arguments(lightning_mp.monitors, "monitors")

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        given = config.get("callbacks") or []
        given = list(given) if isinstance(given, list) else [given]
        kinds = {type(callback) for callback in given}
        ours = [monitor for monitor in self.monitors() if type(monitor) not in kinds]
        # first, so that their clock does not run while other callbacks work
        return super()._instantiate_trainer({**config, "callbacks": [*ours, *given]}, callbacks)

    def monitors(self) -> list[Callback]:
        """The monitors that the configuration asks for."""
        settings = self._get(self.config_init, "monitors")
        return [] if settings is None else lightning_mp.monitors(**settings)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and remember which values the user gave."""
        self.config = parser.parse_args(args)
        self._given = parser.parse_args(args, defaults=False)
        self.check_precision()

    def check_precision(self) -> None:
        """Refuse a name that the Trainer would refuse, before the model and the data are built."""
        name = self._of_subcommand(self.config).trainer.precision_plugin
        if isinstance(name, str):
            try:
                lightning_mp.MasterWeightPrecision(name)  # type: ignore[arg-type]  # the check of the name is the point
            except ValueError as error:
                hint = f" For a class write trainer.precision_plugin.class_path={name}." if "." in name else ""
                raise UsageError(f"trainer.precision_plugin: {error}{hint}") from error

    def _parse_ckpt_path(self) -> None:
        """Take model arguments that the user did not give from the checkpoint's hyperparameters."""
        path = self._of_subcommand(self.config).get("ckpt_path")
        if path and Path(path).is_file():
            saved = _saved_hyperparameters(path)
            if saved:
                self._fill_in(saved, path)

    def _fill_in(self, saved: Mapping[str, Any], path: str) -> None:
        model = self._of_subcommand(self.config).model
        saved_class = saved.get("_class_path", model.class_path)
        if saved_class != model.class_path:
            rank_zero_warn(
                f"{path} was saved by {saved_class}, and the model is {model.class_path}: the hyperparameters in the "
                "checkpoint are not used. Its weights are loaded; give the model's arguments yourself."
            )
            return
        current = _as_dict(model.get("init_args"))
        given = _as_dict(self._of_subcommand(self._given).get("model", Namespace()).get("init_args"))
        differing = {name: saved[name] for name in current if name in saved and saved[name] != current[name]}
        missing = {name: value for name, value in differing.items() if name not in given}
        overruled = {name: value for name, value in differing.items() if name in given}
        if overruled:
            rank_zero_warn(f"{path} was saved with {_pairs(overruled)}; using what you gave: {_pairs(given, overruled)}.")
        if missing:
            rank_zero_info(f"Model arguments taken from {path}: {_pairs(missing)}.")
            update = {"model": {"class_path": model.class_path, "init_args": missing}}
            self.config = self.parser.parse_object({self.config.subcommand: update}, self.config)

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        self.parser.add_instantiator(self._instantiate_precision, Precision, subclasses=True)
        self.parser.add_instantiator(self._instantiate_precision, LossScale, subclasses=True)

    def _instantiate_precision(self, class_type: type[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return class_type(*args, **kwargs)
        except (MisconfigurationException, ValueError) as error:
            part = "trainer.precision_plugin" + (".loss_scale" if issubclass(class_type, LossScale) else "")
            self._precision_error = UsageError(f"{part}: {error}")
            raise

    def instantiate_classes(self) -> None:
        """Build everything; what a precision plugin refuses is shown without a traceback."""
        try:
            super().instantiate_classes()
        except (MisconfigurationException, ValueError) as error:  # may be jsonargparse's, around the plugin's
            if self._precision_error is not None:
                raise self._precision_error from error
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer; what it refuses is the user's to mend, so it is shown without a traceback."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise UsageError(str(error)) from error

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it; what Lightning, or a callback with a baseline, refuses is shown without a traceback."""
        try:
            super()._run_subcommand(subcommand)
        except (BaselineError, MisconfigurationException) as error:
            raise UsageError(str(error)) from error

    def _of_subcommand(self, config: Namespace) -> Namespace:
        return config[config.subcommand]


def _saved_hyperparameters(path: str) -> dict[str, Any]:
    """The hyperparameters in a checkpoint, without reading its tensors from disk."""
    try:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        rank_zero_warn(f"The hyperparameters in {path} are not used: {error}")
        return {}
    saved = dict(checkpoint.get("hyper_parameters") or {})
    saved.pop("_instantiator", None)
    return saved


def _as_dict(values: Namespace | None) -> dict[str, Any]:
    return values.as_dict() if values is not None else {}


def _pairs(values: Mapping[str, Any], names: Mapping[str, Any] | None = None) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in (names or values))


# compare: the parent


def _compare(args: list[str]) -> int:
    """Check everything that can be checked, then train each precision in a process of its own."""
    options, overrides = _compare_parser().parse_known_args(args)
    overrides += [f"--{assignment}" for assignment in options.set]
    try:
        precisions = parse_precisions(options.precisions)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _check_files(options.config)
    _check_assignments(options.set)
    _read_baselines(options.baseline)
    baselines = tuple(str(Path(file).resolve()) for file in options.baseline)
    required = _check_required(options.require, precisions, has_baseline=bool(baselines))
    if options.seeds < 1 or (options.seeds > 1 and (baselines or REFERENCE not in precisions)):
        raise UsageError(
            f"--seeds {options.seeds} is how many seeds of {REFERENCE} are run to make a baseline: 1 or more; if more than 1,"
            f" with {REFERENCE} among --precisions and without --baseline."
        )

    configuration = _ConfigurationOnly(options.config, overrides)
    seed = configuration.seed if options.seed is None else options.seed
    try:
        folder = new_run_folder(Path(options.output_dir), "compare").resolve()
        write_text(folder / "config.yaml", configuration.dump())
    except OSError as error:
        raise UsageError(
            f"--output-dir: no folder can be made in {options.output_dir} ({error.strerror or error}). Name another one."
        ) from error

    console = Console(stderr=True)
    console.print(f"Comparing {', '.join(precisions)} in {folder}", soft_wrap=True, markup=False, highlight=False)
    slow = [name for name in precisions if name in FP16]
    if slow and configuration.is_on_cpu:
        console.print(f"Warning: {', '.join(slow)}: {SLOW_FP16}", soft_wrap=True, markup=False, highlight=False)
    comparison = Comparison(
        name=folder.name,
        command=("lightning-mp", "compare", *args),
        config_files=tuple(options.config),
        overrides=tuple(overrides),
        seed=seed,
        precisions=precisions,
        seeds=options.seeds,
        baselines=baselines,
        required=required,
    )
    plan = Plan(
        folder=folder,
        worker_command=(sys.executable, "-m", "lightning_mp", _WORKER),
        wandb_mode=options.wandb,
        settings={"config_files": options.config, "overrides": overrides, "config": configuration.as_dict()},
        force=options.force,
    )
    with _terminate_as_interrupt():
        comparison = run_comparison(comparison, plan, console)
    _print_report(comparison, folder)
    try:
        _write_page([folder], folder / REPORT_FILE, command=shlex.join(comparison.command), wandb=(options.wandb, folder))
    except (ValueError, OSError) as error:  # the results are there, and so is what they are worth
        print(f"The report could not be made: {error}", file=sys.stderr)
    if comparison.status == INTERRUPTED:
        return 128 + signal.SIGINT
    for missed in comparison.missed:
        print(f"required: {_why_missed(missed)}", file=sys.stderr)
    return 0 if any(result.status == OK for result in comparison.results) and not comparison.missed else 1


def _why_missed(missed: Result | str) -> str:
    if isinstance(missed, str):
        return f"{missed} was not run."
    if missed.status == OK and missed.verdict_status is None:
        return f"{missed.precision} was not judged, as there is no baseline."
    ended = [missed.status] if missed.status != OK else []
    judged = [missed.verdict_status] if missed.verdict_status else []
    return f"{missed.precision} does not match the baseline ({', '.join([*ended, *judged])})."


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-mp compare",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_COMPARE_DESCRIPTION,
        epilog=_COMPARE_EPILOG,
    )
    add = parser.add_argument
    add("-c", "--config", action="append", required=True, help="configuration file; repeat for overlays")
    add(
        "--precisions",
        default=",".join(DEFAULT),
        help=f"comma-separated; known: {', '.join(CANDIDATES)} (default: {','.join(DEFAULT)})",
    )
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="override the configuration")
    add("--output-dir", default="runs", help="each comparison makes a folder of its own in here (default: runs)")
    add("--wandb", choices=MODES, default="offline", help="Weights & Biases (default: offline)")
    add("--baseline", action="append", default=[], metavar="FILE", help="judge by this baseline; repeat for several seeds")
    add("--seeds", type=int, default=1, metavar="N", help="run 32-true with N seeds, a baseline with a band (default: 1)")
    add("--force", action="store_true", help="judge even if settings differ from the baseline's")
    add(
        "--require",
        metavar="NAMES",
        help="exit with status 1 unless these precisions match the baseline: comma-separated, or `all` that are judged",
    )
    add("--seed", type=int, help="default: the configuration's seed_everything, or 0 if that is not a number")
    return parser


_COMPARE_DESCRIPTION = """\
Train one configuration under several precisions, one after another, from the same initial weights on the same data,
and print memory, speed and loss side by side."""

_COMPARE_EPILOG = """\
Any other option goes to the configuration, as in `lightning-mp fit`:
  lightning-mp compare -c config.yaml --trainer.max_steps=200 --model.init_args.lr=1e-3

32-true runs first and records a baseline, baseline.json in its folder; the others are judged by it, and the folder
gets a page, report.html. With --baseline FILE another baseline takes its place, and 32-true is judged, too.

The configuration's own precision, loggers, checkpoint callbacks and monitors are replaced. If its precision_plugin is a
class with settings, `*-master` and `16-mixed` keep those settings; a loss scale is for fp16 alone. `--monitors.*` has
no effect: a comparison measures by itself.

As a check that fails when a precision diverges:
  lightning-mp compare -c config.yaml --precisions bf16-master --baseline fp32.json --require all

Exit status: 0; 1 if every precision failed, or one of --require does not match; 2 for bad input; 130 if interrupted."""


def _check_required(text: str | None, precisions: Sequence[str], *, has_baseline: bool) -> tuple[str, ...]:
    if text is None:
        return ()
    judged = [name for name in precisions if has_baseline or name != REFERENCE]
    if not has_baseline and REFERENCE not in precisions:
        raise UsageError(
            f"--require {text}: there is nothing to match. Add {REFERENCE} to --precisions, or pass --baseline FILE."
        )
    names = judged if text == "all" else list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not has_baseline and REFERENCE in names:
        raise UsageError(
            f"--require {text}: {REFERENCE} is the baseline here, so it is not judged. Leave it out, or pass --baseline FILE."
        )
    absent = [name for name in names if name not in precisions]
    if absent or not names:
        raise UsageError(
            f"--require {text!r} names {', '.join(map(repr, absent)) or 'no precision'}; it can name those that are judged:"
            f" {', '.join(judged) or f'none, as only {REFERENCE} is run'}."
        )
    return tuple(names)


def _read_baselines(files: Sequence[str]) -> Baseline | None:
    """The baseline in several files, read before anything is run, so that a bad one is refused at once."""
    try:
        found = [read_baseline(file) for file in files]
        joined = join_baselines(found) if found else None
        if joined is not None:
            DivergenceTest(joined)  # refuses what cannot be compared with
    except BaselineError as error:
        raise UsageError(f"--baseline: {error}") from error
    return joined


def _check_files(files: Sequence[str]) -> None:
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        raise UsageError(f"no such configuration file: {', '.join(missing)} (looked in {os.getcwd()}).")


def _check_assignments(assignments: Sequence[str]) -> None:
    wrong = [text for text in assignments if "=" not in text or text.startswith("-")]
    if wrong:
        raise UsageError(f"--set takes KEY=VALUE without dashes, such as trainer.max_steps=20; got {', '.join(wrong)}.")


def _print_report(comparison: Comparison, folder: Path) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(comparison_table(comparison))
        for sentence in reading_help(comparison):
            console.print(sentence)
    for line in capture.get().splitlines():
        print(line.rstrip())
    print(f"Files: {folder}")


def _write_page(
    sources: Sequence[Path],
    path: Path,
    *,
    wandb: tuple[Mode, Path] | None = None,
    **options: Any,
) -> None:
    """Make a report page of saved runs."""
    # with matplotlib, a second that other commands do not need
    from lightning_mp.report.page import render
    from lightning_mp.report.page.drawing import Picture
    from lightning_mp.report.page.figures import pictures
    from lightning_mp.report.page.images import to_png
    from lightning_mp.report.saved.sources import story_of

    story = story_of(sources, **options)
    render.write(path, story)
    print(f"Report: {path}")
    if wandb is not None:
        mode, folder = wandb
        drawn = {} if mode == "disabled" else {p.key: to_png(p) for p in pictures(story) if isinstance(p, Picture)}
        if problem := log_pictures(mode, folder.name, folder, drawn):
            print(problem, file=sys.stderr)


def _report(args: list[str]) -> int:
    """Make a report of saved runs."""
    options = _report_parser().parse_args(args)
    output = Path(options.output)
    if not options.output or output.is_dir():
        raise UsageError(f"-o {options.output!r} is a folder. Name a file, such as {output / REPORT_FILE}.")
    if files := [str(parent) for parent in output.parents if parent.is_file()]:
        raise UsageError(f"-o {options.output!r} lies within the file {files[0]}. Name a file in a folder.")
    baseline = _read_baselines(options.baseline)
    try:
        _write_page(
            [Path(run) for run in options.runs],
            output,
            baseline=baseline,
            reference=options.reference,
            force=options.force,
            command=shlex.join(["lightning-mp", "report", *args]),
        )
    except ValueError as error:  # of a source, a baseline, or the name of the reference
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"the report cannot be written to {output} ({error.strerror or error}). Name another file.") from error
    return 0


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-mp report",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_REPORT_DESCRIPTION,
        epilog=_REPORT_EPILOG,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a folder of `lightning-mp compare`, a logger's folder or CSV file, an offline"
        " Weights & Biases run, or a baseline file")  # fmt: skip
    add("-o", "--output", default=REPORT_FILE, metavar="FILE", help=f"the page (default: {REPORT_FILE})")
    add(
        "--baseline",
        action="append",
        default=[],
        metavar="FILE",
        help="judge every run by this baseline, also those that have a verdict; repeat for several seeds",
    )
    add(
        "--reference", metavar="NAME", help="the run that the others are compared with (default: the fp32 run, if there is one)"
    )
    add("--force", action="store_true", help="judge even if settings differ from the baseline's")
    return parser


_REPORT_DESCRIPTION = """\
Make one self-contained HTML page of saved runs: the verdicts, memory, speed, losses, loss scale and gradient range."""

_REPORT_EPILOG = """\
A run keeps the verdict that it got while it trained. Others are judged by --baseline, or by the reference.

  lightning-mp report runs/compare-20250131-120000
  lightning-mp report logs/fp32/version_0 logs/bf16/version_0/metrics.csv --reference fp32/version_0 -o page.html
  lightning-mp report wandb/offline-run-20250131_120000-abcd1234 --baseline fp32.json

Exit status: 0, or 2 if a run cannot be read or the page cannot be written."""


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """While this lasts, SIGTERM ends a comparison as Ctrl-C does: the worker is ended, results are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _ConfigurationOnly(MixedPrecisionCLI):
    """Parses a configuration, with all its classes checked, and builds nothing."""

    def __init__(self, files: Sequence[str], overrides: Sequence[str]) -> None:
        super().__init__(["fit", *(f"--config={file}" for file in files), *overrides])

    @property
    def seed(self) -> int:
        """The configuration's seed if it is a number, else 0."""
        seed = self.config.fit.seed_everything
        return 0 if isinstance(seed, bool) else int(seed)

    @property
    def is_on_cpu(self) -> bool:
        """Whether training is going to run on a CPU, as far as the configuration and this machine tell."""
        accelerator = self.config.fit.trainer.accelerator
        return accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())

    def dump(self) -> str:
        """The resolved configuration, every default included, as YAML."""
        return str(self._parser("fit").dump(self.config.fit, skip_none=False))

    def as_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain containers."""
        return self.config.fit.as_dict()

    def check_precision(self) -> None:
        """Accept anything: each candidate brings its own."""

    def _set_seed(self) -> None:
        """Leave this process's generators alone."""

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


# compare: the worker


def _work(spec_file: str) -> int:
    """Train one candidate and send its events home."""
    events = EventWriter()
    try:
        cli = _WorkerCLI(WorkerSpec.load(spec_file), WorkerReport(events))
        cli.report.finish(cli.trainer, cli.notes)
    except Exception as error:  # whatever the user's code raised is this candidate's result
        traceback.print_exc()
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        events.send("failed", error=f"{kind}{error}")
        return 1
    return 0


class _WorkerCLI(MixedPrecisionCLI):
    """`fit` with one candidate's precision, and without what would make candidates share files or memory.

    Replaced: precision, loggers (by a CSV file in the candidate's folder), checkpoints, our monitors, progress bar.
    """

    def __init__(self, spec: WorkerSpec, report: WorkerReport) -> None:
        self.report = report
        self.notes: list[str] = []
        self._spec = spec
        super().__init__(
            ["fit", f"--config={spec.config}", f"--seed_everything={spec.seed}"],
            save_config_callback=None,
            parser_kwargs={"exit_on_error": False, "fit": {"exit_on_error": False}},
        )

    def check_precision(self) -> None:
        """Accept anything: it is replaced."""

    def monitors(self) -> list[Callback]:
        """None of the configuration's: a comparison measures by itself."""
        return []

    def _measuring(self) -> list[Callback]:
        """The usual monitors, and what makes a baseline or compares with one."""
        spec = self._spec
        measuring = lightning_mp.monitors(fingerprints=False)
        if spec.record_baseline:
            measuring.append(lightning_mp.BaselineRecorder(spec.record_baseline))
        elif spec.baselines:
            measuring.append(lightning_mp.DivergenceMonitor(spec.baselines, force=spec.force, path=spec.verdict))
        return measuring

    def before_instantiate_classes(self) -> None:
        """Put the candidate's precision in, and the configuration's loggers out."""
        trainer = self.config.fit.trainer
        settings = trainer.get("precision_plugin")
        trainer.update(Namespace(CANDIDATES[self._spec.precision]))
        if isinstance(settings, Namespace) and (self._spec.precision.endswith("-master") or self._spec.precision in FP16):
            settings.init_args.precision = self._spec.precision  # keep the settings, such as the form of the masters
            if self._spec.precision not in FP16 and "loss_scale" in settings.init_args:
                settings.init_args.loss_scale = None
            trainer.precision_plugin = settings
        if trainer.logger not in (None, True, False):
            self.notes.append("the configuration's loggers were replaced by a CSV file.")
        trainer.logger = False

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer around the recorder."""
        configured = self.config_init.fit.trainer.callbacks or []
        callbacks: list[Callback] = configured if isinstance(configured, list) else [configured]
        callbacks, checkpoints = _parted(callbacks, Checkpoint)
        if checkpoints:
            self.notes.append("the configuration's checkpoint callbacks were left out.")
        kept, measuring = _parted(callbacks, Monitor)
        if measuring:
            names = ", ".join(type(callback).__name__ for callback in measuring)
            self.notes.append(f"the configuration's {names} gave way to the comparison's own.")
        trainer = super().instantiate_trainer(
            **kwargs,
            logger=CSVLogger(self._spec.folder, name="metrics", version=""),
            callbacks=[self.report.recorder, *kept, *self._measuring(), self.report],
            default_root_dir=self._spec.folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        if self._spec.precision in FP16 and trainer.strategy.root_device.type == "cpu":
            self.notes.append(SLOW_FP16)
        return trainer


def _parted(callbacks: Sequence[Callback], kind: type[Callback]) -> tuple[list[Callback], list[Callback]]:
    """The callbacks that are not of a kind, and those that are."""
    return [one for one in callbacks if not isinstance(one, kind)], [one for one in callbacks if isinstance(one, kind)]
