"""Compare a run with a saved baseline while it trains, and say in the end whether it matches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_mp.callbacks.baseline import check_name_of_data, is_alone, on_all_ranks
from lightning_mp.callbacks.publish import AXIS, alert, publish, update_summary
from lightning_mp.callbacks.recorded_run import RecordedRun, RecordingMonitor
from lightning_mp.callbacks.speed import SpeedMonitor
from lightning_mp.callbacks.step_loss import StepLoss
from lightning_mp.callbacks.wandb import PREFIX as WANDB
from lightning_mp.callbacks.wandb import log_blocks, read_offline, read_reference
from lightning_mp.files import write_json
from lightning_mp.numerics.baseline import (
    Baseline,
    BaselineRun,
    Difference,
    differences,
    is_paired,
    join_baselines,
    read_baseline,
    read_csv,
)
from lightning_mp.numerics.divergence import Axis, Block, DivergenceTest, Rule, Verdict

PREFIX = "divergence"
VERDICT_FILE = "verdict.json"

Action = Literal["warn", "stop", "raise", "alert"]
ACTIONS: tuple[Action, ...] = get_args(Action)
BaselineLike: TypeAlias = "str | os.PathLike[str] | Baseline"


class DivergenceError(RuntimeError):
    """A run diverges from its baseline, and ``on_divergence`` is "raise". The message says where, and by how much.

    Example:
        >>> from lightning_mp import DivergenceError
        >>> try:  # trainer.fit(module), with DivergenceMonitor("fp32.json", on_divergence="raise") among the callbacks
        ...     raise DivergenceError("The loss diverges from its baseline.")
        ... except DivergenceError as error:
        ...     print(error)
        The loss diverges from its baseline.
    """


class DivergenceMonitor(RecordingMonitor):
    """Watches whether a run diverges from a saved baseline: an alarm while it trains, a verdict when it ends.

    The rule is that of :mod:`lightning_mp.numerics.divergence`; the loss is that of :mod:`lightning_mp.callbacks.step_loss`. It
    works with any precision, ours or Lightning's, any logger or none, and in manual optimization if `training_step` returns its
    loss.

    =============================================  ===========================================================================
    key                                            meaning
    =============================================  ===========================================================================
    ``divergence/loss``                            mean loss over the last block
    ``divergence/baseline``                        the baseline's over the same block, a mean over seeds
    ``divergence/gap``                             the difference; positive is worse
    ``divergence/margin``                          the gap from which on a difference matters
    ``divergence/evidence``                        evidence of divergence over what an alarm needs: 1 is the alarm
    ``divergence/band_low``, ``band_high``         smallest and largest of the seeds' means, if there are at least two
    =============================================  ===========================================================================

    A block is a hundredth of the baseline's length (``Rule.blocks``). Values are published at the log step
    (``log_every_n_steps``) that follows the end of a block, and stay the same in ``trainer.callback_metrics`` until the next.
    Before the first there are none, which ``EarlyStopping`` takes with ``strict=False``. How often is logged changes neither
    blocks nor verdict. A trainer has one such monitor at the most; several baselines are its seeds.

    When the state changes, from healthy to diverged or back, it is said once. The verdict is in :attr:`verdict` after the fit,
    in the log, in the run summary (``divergence/verdict``, its status; ``verdict_gap``, ``verdict_low`` and ``verdict_high``,
    estimate and interval; ``smallest_visible_gap``, ``coverage``, ``paired``, ``seeds``, ``explanation``), in a JSON file with
    all blocks, and in Weights & Biases as the picture ``divergence/curves`` and the table ``divergence/blocks``.

    A loss that is not finite is an alarm at the next log step, unless the precision plugin skipped the step for it. Masters are
    not searched for values that are not finite: the next loss shows them.

    Where batch size, learning rates, optimizer, model or data differ from the baseline's, the runs are NOT COMPARABLE: that is
    said once, values are still published, and no alarm is acted upon, except for a loss that is not finite.

    Between log steps nothing is read from the device, but a sample of the data ever more rarely, and no rank asks another. A
    log step, or a checkpoint, reads what is unread: one device-to-host sync; with several ranks an all-reduce and a second
    sync. All ranks know the same and act together.
    ``trainer.validate``, ``test`` and ``predict`` are not watched; ``fast_dev_run`` only checks that the baseline can be read.

    Args:
        baseline: the file of a :class:`~lightning_mp.callbacks.baseline.BaselineRecorder`; or a CSV of Lightning's
            ``CSVLogger``; or a ``.wandb`` file, an offline run of Weights & Biases; or ``wandb:entity/project/name:alias``, an
            artifact that holds such a file; or ``wandb:entity/project/run_id``, a run; or a ``Baseline``; or several of these,
            seeds of one baseline. What comes from Weights & Biases is kept in ``LIGHTNING_MP_CACHE`` or the user's cache
            folder, and taken from there the next time.
        on_divergence: "warn"; "stop", which also ends training after the step, on all ranks; "raise", a
            :class:`DivergenceError` on all ranks; "alert", which also sends an alert through Weights & Biases.
        rule: blocks, margins and error rate of the test.
        force: compare and act on alarms although settings differ.
        loss_key: column of the loss in a CSV, or key in a run's history.
        path: where the verdict is written; by default ``verdict.json`` in the run's folder, or in ``default_root_dir``; if
            that is not on this machine, in the working folder.
        data: the name of the training data that the baseline was recorded with, if it has one.

    Raises:
        ValueError: ``on_divergence`` is none of these, or there is no baseline.
        BaselineError: before training, if the baseline is missing, broken or of another schema; with its path.

    Attributes:
        verdict: how the last fit ended; None before that.
        test: the test with its blocks.
        baseline: what was read; None before training.

    Its ``state_dict`` holds ``run``, what is recorded of this run
    (:class:`~lightning_mp.callbacks.recorded_run.RecordedRun`); ``test``, the test's state; ``key``, a hash of baseline and
    rule that it belongs to; and ``is_diverged`` and ``was_told``, what was said of it.

    Example:
        >>> from lightning_mp import Trainer
        >>> from lightning_mp.callbacks.divergence import DivergenceMonitor
        >>> monitor = DivergenceMonitor("baselines/seed0.json", on_divergence="stop")
        >>> trainer = Trainer(
        ...     precision_plugin="bf16-master", callbacks=[monitor], accelerator="cpu", logger=False, enable_checkpointing=False
        ... )
    """

    def __init__(
        self,
        baseline: BaselineLike | Sequence[BaselineLike],
        *,
        on_divergence: Action = "warn",
        rule: Rule | None = None,
        force: bool = False,
        loss_key: str | None = None,
        path: str | os.PathLike[str] | None = None,
        data: str | None = None,
    ) -> None:
        super().__init__()
        if on_divergence not in ACTIONS:
            raise ValueError(f"on_divergence={on_divergence!r} is none of {', '.join(map(repr, ACTIONS))}.")
        sources = [baseline] if isinstance(baseline, str | os.PathLike | Baseline) else baseline or ()
        self._sources: tuple[BaselineLike, ...] = tuple(sources)
        if not self._sources or not all(isinstance(one, str | os.PathLike | Baseline) and one != "" for one in self._sources):
            raise ValueError(f"baseline={baseline!r} names no baseline. Pass the path of a file, or several.")
        check_name_of_data(data)
        self.on_divergence = on_divergence
        self.rule = rule or Rule()
        self.force = force
        self.loss_key = loss_key
        self.path = None if path is None else Path(path)
        self.data = data
        self.baseline: Baseline | None = None
        self.verdict: Verdict | None = None
        self._test: DivergenceTest | None = None
        self._file: Path | None = None  # of the verdict, once training has begun
        self._key = ""
        self._reset()

    def _reset(self) -> None:
        self._differences: list[Difference] = []
        self._is_blind = False  # the axis was lost
        self._is_diverged = False
        self._was_told = False  # of the first alarm
        self._said_not_comparable = False
        self._published = 0  # blocks

    @property
    def test(self) -> DivergenceTest:
        """The test with its blocks.

        Raises:
            RuntimeError: no fit has begun.
        """
        if self._test is None:
            raise RuntimeError("DivergenceMonitor has no test before a fit has begun.")
        return self._test

    # --- before training ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the baseline, and look at the weights before they are converted."""
        self._is_active = False
        if stage != "fit":
            return
        self._file = None
        baseline, test = on_all_ranks(trainer, self._read_baseline)
        self._is_active = not trainer.fast_dev_run  # type: ignore[attr-defined]
        if not self._is_active:
            return
        key = hashlib.sha256(json.dumps([baseline.as_json(), asdict(self.rule)], sort_keys=True).encode()).hexdigest()
        if self._run.steps.is_continued_by(trainer) and key == self._key:
            return
        self.verdict = None
        self.baseline, self._test, self._key = baseline, test, key
        self._run = RecordedRun()
        self._run.fingerprint.watch(trainer)
        self._reset()
        others = {run.precision for run in baseline.runs if not run.is_fp32 and run.precision != "unknown"}
        unfinished = [run for run in baseline.runs if run.status != "finished"]
        if unfinished and not self.force:
            steps = ", ".join(f"{run.curve.last_step:,}" for run in unfinished)
            rank_zero_warn(
                f"The baseline {baseline.source} is not finished: recording ended at step {steps}. So the verdict cannot be"
                " MATCHES, unless the run pairs with a finished one. Record it to its end, or pass force=True."
            )
        if others:
            rank_zero_warn(f"The baseline {baseline.source} was not recorded in fp32, but under {', '.join(sorted(others))}.")

    def _read_baseline(self) -> tuple[Baseline, DivergenceTest]:
        found = [_read(source, self.loss_key) for source in self._sources]
        baseline = found[0] if len(found) == 1 else join_baselines(found)
        return baseline, DivergenceTest(baseline, rule=self.rule)  # which refuses a baseline that cannot be compared with

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up counts and settings, and say so if they already differ."""
        super().on_train_start(trainer, pl_module)
        if not self._is_active:
            return
        self.verdict = None
        if self._run.steps.misses_steps_of(trainer):
            self._run = RecordedRun()
            self._test = DivergenceTest(self._known_baseline, rule=self.rule)
            self._reset()
        self._run.start(trainer, pl_module, self.data, lambda: self._read_steps(trainer))
        folder = trainer.log_dir or trainer.default_root_dir  # here, as it asks the other ranks
        logger: Any = trainer.logger
        if logger is not None and getattr(logger, "log_dir", None) is None and logger.version is not None:
            folder = os.path.join(folder, str(logger.name), str(logger.version))  # of Weights & Biases, which runs share
        if self.path is None and "://" in folder:
            rank_zero_info(f"The verdict is written to the working folder, as {folder} is not on this machine.")
            folder = ""
        self._file = (self.path or Path(folder) / VERDICT_FILE).absolute()  # the working folder may change
        if self._run.steps.joined_late:
            rank_zero_warn(
                f"DivergenceMonitor begins at step {self._run.steps.step + 1} of a run whose checkpoint has no record of the"
                " steps before. Samples and tokens are unknown, so it is compared by steps, unpaired, and from here on."
            )
        self._compare_settings(trainer)

    # --- training ----------------------------------------------------------------------------------------------------------

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Take the loss; at log steps read what is unread, publish the last block, and act on an alarm."""
        if self._is_active and self._run.batch_end(trainer, pl_module, outputs):
            self._read_steps(trainer)
            self._follow(trainer, is_over=False)

    def place(self, trainer: Trainer) -> dict[str, float]:
        """The tokens by now, unless a `SpeedMonitor` tells them. One all-reduce if there are several ranks."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not self._is_active or any(isinstance(other, SpeedMonitor) for other in callbacks):
            return {}
        self._read_steps(trainer)
        tokens = self._run.curve.last_tokens
        return {} if tokens is None else {AXIS: float(tokens)}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is left, act on an alarm in it, and give the verdict."""
        if self._is_active:
            self._read_steps(trainer)
            self._follow(trainer, is_over=True)
            self._conclude(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the verdict on what there is. Neither other ranks nor a device that may have failed are asked for more."""
        if self._is_active:
            if is_alone(trainer):
                self._read_steps(trainer)
            has_begun = self._file is not None
            if has_begun and self.verdict is None and self._run.curve.last_step:
                self._conclude(trainer)
            self._leave(trainer)
        super().on_exception(trainer, pl_module, exception)

    # --- the comparison ----------------------------------------------------------------------------------------------------

    def _read_steps(self, trainer: Trainer) -> None:
        """Read what is unread, and give it to the test."""
        # the order of data is that of rank 0's samples, so it says which run the others are paired with, counted from 1
        mine = self._pairing(trainer) if trainer.is_global_zero else None
        steps, pairing = self._run.read(trainer, 0.0 if mine is None else mine + 1.0)
        if not steps:
            return
        paired_with = int(pairing) - 1 if pairing else None
        if paired_with != self.test.paired_with:
            self.test.set_pairing(paired_with)
        for step in steps:
            if self.test.last_step and _position(step, self.test.axis) is None:
                self._lose_axis(step)
                break
            self.test.add(step.step, step.loss, step.samples, step.tokens)

    def _pairing(self, trainer: Trainer) -> int | None:
        candidate = self._run.as_run(trainer, "recording")
        return next((index for index, run in enumerate(self._runs) if is_paired(run, candidate)), None)

    @property
    def _known_baseline(self) -> Baseline:
        assert self.baseline is not None
        return self.baseline

    @property
    def _runs(self) -> tuple[BaselineRun, ...]:
        return self._known_baseline.runs

    def _lose_axis(self, step: StepLoss) -> None:
        if not self._is_blind:
            self._is_blind = True
            rank_zero_warn(
                f"DivergenceMonitor compares no further than step {step.step - 1}, as the {self.test.axis} of a batch are"
                " unknown from there on. Give the module a method count_tokens(batch) that always knows."
            )

    def _compare_settings(self, trainer: Trainer) -> None:
        """Find in what the run differs from the baseline by now, and say so once if that forbids the comparison."""
        run = self._runs[self.test.paired_with or 0]
        self._differences = differences(run, self._run.as_run(trainer, "recording", like=run))
        deciding = [difference.text for difference in self._differences if difference.decides]
        if deciding and not self.force and not self._said_not_comparable:
            self._said_not_comparable = True
            rank_zero_warn(
                f"NOT COMPARABLE with the baseline {self._source}: {'; '.join(deciding)}. Values are published, but no alarm is"
                " acted upon. Make the settings the same, record a baseline with these, or pass force=True to compare all the"
                " same."
            )

    @property
    def _source(self) -> str:
        return self._known_baseline.source

    # --- what is made of it ------------------------------------------------------------------------------------------------

    def _follow(self, trainer: Trainer, *, is_over: bool) -> None:
        """Publish the last block if it is new, and act if the state has changed."""
        blocks = self.test.blocks
        if len(blocks) > self._published:
            self._published = len(blocks)
            self._compare_settings(trainer)
            is_logged = bool(trainer.log_every_n_steps) and not is_over  # type: ignore[attr-defined]
            publish(trainer, _values(blocks[-1]), to_loggers=is_logged)
        is_diverged = self._diverges()
        if is_diverged == self._is_diverged:
            return
        self._is_diverged = is_diverged
        if is_diverged:
            self._was_told = True
            self._act(trainer, self._describe_alarm())
        else:
            text = f"The run is back at its baseline {self._source}; the alarm is over."
            rank_zero_info(text)
            if self.on_divergence == "alert":
                alert(trainer, "Loss back at the baseline", text)

    def _diverges(self) -> bool:
        """Whether a loss was not finite, or there was an alarm and its evidence is not used up."""
        test = self.test
        if test.nonfinite_step is not None:
            return True
        if not self._is_comparable:
            return self._is_diverged  # neither an alarm nor a recovery means anything
        if test.alarm is not None and not self._was_told:
            return True
        return test.evidence > 0.0 if self._is_diverged else test.evidence >= 1.0

    @property
    def _is_comparable(self) -> bool:
        return self.force or not any(difference.decides for difference in self._differences)

    def _describe_alarm(self) -> str:
        if self.test.nonfinite_step is not None:
            return f"The loss was not finite at step {self.test.nonfinite_step}."
        alarm = self.test.alarm
        block = next((block for block in self.test.blocks if alarm and block.index == alarm.block), self.test.blocks[-1])
        return (
            f"The run diverges from its baseline {self._source}: the loss was {block.candidate:.4g} up to"
            f" {block.end:,.0f} {self.test.axis} (block {block.index + 1} of {self.rule.blocks}), the baseline's"
            f" {block.baseline:.4g}; the gap of {block.gap:+.4f} is beyond the margin of {block.margin:.4f}, with evidence that"
            f" a healthy run shows with a probability below {self.rule.alpha:g}."
        )

    def _act(self, trainer: Trainer, text: str) -> None:
        if self.on_divergence == "raise":
            raise DivergenceError(text)
        if self.on_divergence == "stop":
            trainer.should_stop = True
            text += ' Training ends here, as on_divergence="stop".'
        rank_zero_warn(text)
        if self.on_divergence == "alert":
            alert(trainer, "Loss diverges from the baseline", text)

    def _conclude(self, trainer: Trainer) -> None:
        """Give the verdict, and write it everywhere."""
        self._compare_settings(trainer)
        skipped = getattr(trainer.precision_plugin, "skipped_steps", 0)
        self.verdict = verdict = self.test.verdict(differences=self._differences, force=self.force, skipped_steps=skipped)
        say = rank_zero_warn if verdict.status == "DIVERGED" else rank_zero_info
        say(f"{verdict.status} against the baseline {self._source}. {verdict.explanation}")
        if trainer.is_global_zero:
            self._write(verdict)  # before what needs a service that may have failed
        update_summary(trainer, _summary(verdict))
        if self.test.blocks:
            log_blocks(trainer, self.test.blocks, self.test.axis)

    def _write(self, verdict: Verdict) -> None:
        assert self._file is not None
        content = {
            **verdict.as_dict(),
            "baseline": self._source,
            "axis": self.test.axis,
            "nonfinite_step": self.test.nonfinite_step,
            "nonfinite_losses_skipped": self._run.steps.nonfinite_skipped,
            "blocks": [asdict(block) for block in self.test.blocks],
        }
        try:
            write_json(self._file, content)
        except OSError as error:
            rank_zero_warn(
                f"The verdict could not be written to {self._file} ({error}). It is in monitor.verdict and in the log."
            )

    def recipe(self) -> dict[str, str | float]:
        """``baseline``, where it was read, ``on_divergence``, and the rule's ``blocks``, ``alpha``, margins and so on."""
        if self.baseline is None:
            return {}
        return {"baseline": self._source, "on_divergence": self.on_divergence, **asdict(self.rule)}

    # --- state -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See the class. Empty before a fit has begun."""
        if self._test is None:
            return {}
        return {
            "run": self._run.state_dict(),
            "test": self._test.state_dict(),
            "key": self._key,
            "is_diverged": self._is_diverged,
            "was_told": self._was_told,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; with another baseline than before, compare from there on."""
        if not self._is_active:
            return  # a checkpoint that is validated or tested says nothing of the fit
        self._run.load_state_dict(state_dict["run"])
        if state_dict["key"] != self._key:
            rank_zero_warn(
                f"The baseline {self._source}, or the rule, is not the one of the checkpoint; the run is compared from here on."
            )
            return
        self.test.load_state_dict(state_dict["test"])
        self._is_diverged, self._was_told = state_dict["is_diverged"], state_dict["was_told"]
        self._published = len(self.test.blocks)


def _read(source: BaselineLike, loss_key: str | None) -> Baseline:
    if isinstance(source, Baseline):
        return source
    if isinstance(source, str) and source.startswith(WANDB):
        return read_reference(source, loss_key)
    suffix = Path(source).suffix.lower()
    if suffix == ".wandb":
        return read_offline(source, loss_key)
    return read_csv(source, loss_key) if suffix == ".csv" else read_baseline(source)


def _position(step: StepLoss, axis: Axis) -> int | None:
    return {"tokens": step.tokens, "samples": step.samples, "steps": step.step}[axis]


def _values(block: Block) -> dict[str, float]:
    values = {
        "loss": block.candidate,
        "baseline": block.baseline,
        "gap": block.gap,
        "margin": block.margin,
        "evidence": block.evidence,
        "band_low": block.band_low,
        "band_high": block.band_high,
    }
    return {f"{PREFIX}/{name}": value for name, value in values.items() if value is not None}


def _summary(verdict: Verdict) -> Mapping[str, str | float]:
    low, high = verdict.interval or (None, None)
    values: dict[str, Any] = {
        "verdict": verdict.status,
        "verdict_gap": verdict.gap,
        "verdict_low": low,
        "verdict_high": high,
        "smallest_visible_gap": verdict.smallest_visible_gap,
        "coverage": verdict.coverage,
        "paired": int(verdict.paired),
        "seeds": verdict.seeds,
        "explanation": verdict.explanation,
    }
    return {f"{PREFIX}/{name}": value for name, value in values.items() if value is not None}
