"""What is recorded of a run so that it can be compared with another: its curve, its fingerprints, and its settings.

A baseline and the run that is judged by it are recorded by the same code, so that what differs is in the runs.

**Learning rates** are taken at the applied steps 1, 2, 4, 8, ... Loss scaling skips a step or two, and a schedule that advances
with applied steps then lags by as many; by applied steps it is the same schedule. A schedule that advances by epochs does not
lag, so rates by plain steps are kept too, and the one that fits the other run counts. A rate that is a tensor is read from its
device at those steps.

**The global batch** is told by the first :data:`SIZED_STEPS` steps: it is as many samples as most of them have, so that a short
last batch of each epoch changes nothing, and unknown where sizes vary. Of tokens in a step it is the median.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.callbacks.fingerprint import RunFingerprint
from lightning_mp.callbacks.publish import Monitor
from lightning_mp.callbacks.step_loss import StepLoss, StepLosses, read_before_saving
from lightning_mp.callbacks.tokens import count_batch
from lightning_mp.cost.devices import device_name, versions
from lightning_mp.cost.roofline import matmul_format
from lightning_mp.numerics.baseline import BaselineRun, Status
from lightning_mp.numerics.curve import LossCurve

#: The size of the global batch is told by so many steps.
SIZED_STEPS = 1000
#: Precisions that are fp32 or finer.
FULL_PRECISIONS = ("32", "32-true", "64", "64-true")
#: Settings of optimizers that choose an implementation and no arithmetic.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


class RecordedRun:
    """A run as far as it is recorded; a callback calls it from its hooks.

    Attributes:
        curve: true losses against steps, samples and tokens.
        steps: the reader of true losses.
        fingerprint: of initial weights and data order, as this process sees them.
        validation: for each metric a row for each validation: ``step``, ``samples``, ``tokens``, ``value``.
        learning_rates: the first group's, used at the applied steps 1, 2, 4, 8, ..., keyed by the step as a string.
        settings: of the module, its optimizers and the trainer.
    """

    def __init__(self) -> None:
        self.curve = LossCurve()
        self.steps = StepLosses()
        self.fingerprint = RunFingerprint()
        self.validation: dict[str, list[dict[str, float | int | None]]] = {}
        self.learning_rates: dict[str, float] = {}
        self.settings: dict[str, Any] = {}
        self._rates_by_step: dict[str, float] = {}
        self._device = ""
        self._sizes: dict[str, Counter[int]] = {"samples": Counter(), "tokens": Counter()}

    # --- hooks -------------------------------------------------------------------------------------------------------------

    def start(self, trainer: Trainer, pl_module: LightningModule, data: str | None, read: Callable[[], object]) -> None:
        """Take up counts and settings; to be called in ``on_train_start``.

        Args:
            trainer: the trainer.
            pl_module: the module.
            data: the user's name for the dataset.
            read: reads what is unread, before a checkpoint is saved.
        """
        self.steps.start(trainer, pl_module)
        self._device = device_name(trainer.strategy.root_device)
        if self.steps.joined_late:
            self.fingerprint = RunFingerprint()  # of weights and samples that are not the first ones
        settings = _settings(trainer, pl_module)
        if "hyperparameters" in self.settings:
            settings["hyperparameters"] = self.settings["hyperparameters"]  # of the beginning: schedules change some
        self.settings = settings if data is None else {**settings, "data": data}
        read_before_saving(trainer, read)

    def batch_start(self, trainer: Trainer, batch: Any) -> None:
        """Look at a batch before the module does."""
        count = count_batch(batch)
        self.steps.batch_start(count, batch)
        if not self.steps.joined_late:
            self.fingerprint.add(batch, count.samples)
        self.note_learning_rate(trainer)

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> bool:
        """Take the loss of a batch; whether to read now."""
        return self.steps.batch_end(trainer, pl_module, outputs)

    def note_learning_rate(self, trainer: Trainer) -> None:
        """Keep the learning rate of a step that is one of those; to be called right before an optimizer steps.

        Also at the start of a batch: a step that is skipped is not announced.
        """
        step = self.steps.step + 1
        applied = step - getattr(trainer.precision_plugin, "skipped_steps", 0)
        if step & (step - 1) and applied & (applied - 1):
            return  # neither is a power of two
        for at, rates in ((applied, self.learning_rates), (step, self._rates_by_step)):
            if at > 0 and at & (at - 1) == 0:
                rate = _learning_rate(trainer)
                if rate is not None:
                    rates[str(at)] = rate

    def read(self, trainer: Trainer, message: float = 0.0) -> tuple[list[StepLoss], float]:
        """Read the steps that are unread, and add them to the curve; see :meth:`StepLosses.read`."""
        samples, tokens = self.curve.last_samples or 0, self.curve.last_tokens or 0
        found, message = self.steps.read(trainer, message)
        for step in found:
            self.curve.add(*step)
            if step.step <= SIZED_STEPS:
                samples = self._count_size("samples", step.samples, samples)
                tokens = self._count_size("tokens", step.tokens, tokens)
        return found, message

    def _count_size(self, name: str, total: int | None, before: int) -> int:
        if total is None:
            return before
        self._sizes[name][total - before] += 1
        return total

    def leave(self, trainer: Trainer) -> None:
        """Leave trainer and plugin as they were, and keep nothing of the module."""
        self.steps.leave()
        self.fingerprint.unwatch(trainer)
        trainer.__dict__.pop("save_checkpoint", None)

    # --- what is known -----------------------------------------------------------------------------------------------------

    def add_validation(self, values: Mapping[str, float | None]) -> None:
        """Keep the metrics of a validation that has just ended, at the last step that was read."""
        curve = self.curve
        for name, value in values.items():
            place = {"step": curve.last_step, "samples": curve.last_samples, "tokens": curve.last_tokens}
            self.validation.setdefault(name, []).append({**place, "value": value})

    def as_run(self, trainer: Trainer, status: Status, like: BaselineRun | None = None) -> BaselineRun:
        """Everything so far.

        Args:
            trainer: the trainer, for its precision.
            status: of the run.
            like: the run that this one is going to be compared with.
        """
        precision = str(trainer.precision_plugin.precision)
        is_tf32 = matmul_format(precision, trainer.strategy.root_device) == "tf32"
        tokens = self._sizes["tokens"]
        sizes = {
            "global_batch_samples": _usual(self._sizes["samples"]),
            "tokens_per_step": statistics.median(tokens.elements()) if tokens else None,
        }
        seed = os.environ.get("PL_GLOBAL_SEED", "")
        return BaselineRun(
            curve=self.curve,
            status=status,
            precision=f"{precision} (matrix products in tf32)" if is_tf32 else precision,
            is_fp32=precision in FULL_PRECISIONS and not is_tf32,
            seed=int(seed) if seed.isdecimal() else None,
            weights=self.fingerprint.weights,
            data_order=dict(self.fingerprint.data_order) if trainer.is_global_zero else {},  # other ranks have other samples
            settings={
                **self.settings,
                **{key: size for key, size in sizes.items() if size is not None},
                "learning_rates": self._rates_like(like),
            },
            validation={name: list(rows) for name, rows in self.validation.items()},
            device=self._device,
            versions=versions(),
        )

    def _rates_like(self, like: BaselineRun | None) -> dict[str, float]:
        """Learning rates by applied steps, or by plain steps where those are nearer to another run's."""
        theirs = like.settings.get("learning_rates", {}) if like is not None else {}
        rates = dict(self.learning_rates)
        for step, rate in self._rates_by_step.items():
            if step in theirs and abs(rate - theirs[step]) < abs(rates.get(step, float("inf")) - theirs[step]):
                rates[step] = rate
        return rates

    # --- state -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, in plain containers.

        Keys: ``curve``, ``steps`` (totals), ``fingerprint``, ``validation``, ``settings``, ``learning_rates`` (by applied
        steps), ``rates_by_step``, ``sizes`` (of steps, how many there were of each).
        """
        return {
            "curve": self.curve.as_dict(),
            "steps": self.steps.state_dict(),
            "fingerprint": self.fingerprint.state_dict(),
            "validation": {name: [dict(row) for row in rows] for name, rows in self.validation.items()},
            "settings": dict(self.settings),
            "learning_rates": dict(self.learning_rates),
            "rates_by_step": dict(self._rates_by_step),
            "sizes": {name: dict(sizes) for name, sizes in self._sizes.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.curve = LossCurve.from_dict(state_dict["curve"])
        self.steps.load_state_dict(state_dict["steps"])
        self.fingerprint.load_state_dict(state_dict["fingerprint"])
        self.validation = {name: list(rows) for name, rows in state_dict["validation"].items()}
        self.settings = dict(state_dict["settings"])
        self.learning_rates, self._rates_by_step = dict(state_dict["learning_rates"]), dict(state_dict["rates_by_step"])
        self._sizes = {name: Counter(sizes) for name, sizes in state_dict["sizes"].items()}


class RecordingMonitor(Monitor):
    """A monitor that records the run it is attached to. A subclass sets it up, and says what is done with it."""

    def __init__(self) -> None:
        self._run = RecordedRun()
        self._is_active = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at the batch before the module does."""
        if self._is_active:
            self._run.batch_start(trainer, batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the learning rate that is used."""
        if self._is_active:
            self._run.note_learning_rate(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave trainer and plugin as they were."""
        if self._is_active:
            self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        self._is_active = False
        self._run.leave(trainer)


def _usual(sizes: Counter[int]) -> int | None:
    """The size that most steps have, or None where they vary."""
    size, steps = sizes.most_common(1)[0] if sizes else (None, 0)
    return size if 2 * steps > sizes.total() else None


def _settings(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """What decides whether runs can be compared, as far as it is known before the first step."""
    settings: dict[str, Any] = {
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
        "hyperparameters": [[_plain(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
    }
    parameters = list(pl_module.parameters())
    if not any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        settings["parameters"] = sum(parameter.numel() for parameter in parameters)
        settings["trainable_parameters"] = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    if pl_module.automatic_optimization:
        clip = float(trainer.gradient_clip_val or 0.0)
        settings["gradient_clip_val"] = clip if math.isfinite(clip) else 0.0  # which clips nothing either
        if settings["gradient_clip_val"] and trainer.gradient_clip_algorithm == "value":
            settings["gradient_clip_algorithm"] = "value"
    samples = _dataset_samples(trainer)
    if samples is not None:
        settings["dataset_samples"] = samples
    steps = trainer.estimated_stepping_batches
    if 0 < steps < float("inf"):
        settings["max_steps"] = int(steps)
    return settings


def _learning_rate(trainer: Trainer) -> float | None:
    """The first group's, or None where it has none: some optimizers find their own."""
    groups = trainer.optimizers[0].param_groups if trainer.optimizers else []
    rate = groups[0].get("lr") if groups else None
    return float(rate) if isinstance(rate, int | float | Tensor) and math.isfinite(rate) else None


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain finite numbers of an optimizer's group, without its learning rate and what schedules keep of it."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name == "lr" or name.endswith("_lr") or name in (*IMPLEMENTATION, "params"):
            continue
        if isinstance(value, Tensor) and value.ndim == 0:
            value = value.item()
        if _is_number(value):
            found[name] = _number(value)
        elif isinstance(value, list | tuple) and all(map(_is_number, value)):
            found[name] = [_number(item) for item in value]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)  # JSON has no others


def _number(value: float) -> float:
    """A number of Python's own; numpy's float64 is a float too, and torch's safe loader refuses it."""
    return value if type(value) in (int, float, bool) else float(value)


def _dataset_samples(trainer: Trainer) -> int | None:
    """The number of samples of the training dataset, if there is one dataset and it knows."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    try:
        return len(dataset)  # type: ignore[arg-type]  # a TypeError is the answer of datasets without a length
    except (TypeError, NotImplementedError):
        return None


def published_numbers(trainer: Trainer) -> dict[str, float]:
    """Peak memory, bytes per parameter, speed and step time, as far as monitors published them."""
    # not through `trainer.callback_metrics`: it computes the metrics that the module logged, which may ask other ranks
    published = trainer._logger_connector._callback_metrics
    keys = {
        "peak_gib": ("memory/run_peak_gib", "memory/peak_gib"),
        "peak_rss_gib": ("memory/peak_rss_gib",),
        "tokens_per_s": ("throughput/tokens_per_s",),
        "step_time_ms": ("throughput/step_time_ms",),
        "bytes_per_parameter": ("memory/bytes_per_parameter",),
    }
    found = {name: next((published[key] for key in some if key in published), None) for name, some in keys.items()}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
