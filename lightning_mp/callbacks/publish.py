"""How a callback makes its numbers known: to the loggers, in ``trainer.callback_metrics``, and in the progress bar.

``LightningModule.log`` alone would not do. It repeats a value that was logged once in every later row of the epoch, so that a
number that is sampled, or unknown for a while, would look as if it had been measured again. It copies Python numbers to the
device, which makes the host wait, and takes a fraction of a millisecond for each. Here loggers get a value once, and
``trainer.callback_metrics``, which ``ModelCheckpoint`` and ``EarlyStopping`` read, keeps the last known one, on the CPU.

**One row.** What all monitors of a trainer publish in a step is collected, and given to each logger in one piece when the last
monitor is done with the batch: at a step at which Lightning logs (``log_every_n_steps``), or which a monitor sampled. What is
not due for the loggers waits for the next row. So each row of Weights & Biases has ``throughput/tokens``, its x axis, and what
belongs together can be compared.

**One call.** Lightning calls each hook of each callback through its profiler, empty hooks too: with five callbacks that is a
tenth of a millisecond for each batch, more than what they do in it. So monitors that stand side by side among the callbacks
share one call while they train: the first of them calls the others, in their order. See :func:`_share_calls`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from lightning_mp.cost.devices import device_name, versions

AXIS = "throughput/tokens"
#: How Weights & Biases sums a metric up; the others by their last value.
SUMMARIES = {
    "memory/peak_gib": "max",
    "memory/peak_reserved_gib": "max",
    "memory/peak_rss_gib": "max",
    "memory/run_peak_gib": "max",
}
#: What the progress bar shows, under which name, and how.
IN_PROGRESS_BAR = {
    "throughput/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "memory/peak_gib": ("peak_gib", "{:.2f}"),
    "memory/peak_rss_gib": ("rss_gib", "{:.2f}"),
    "loss_scale/log2": ("log2_scale", "{:g}"),
}


class Monitor(Callback):
    """A callback that measures something and publishes it at the end of a batch.

    A subclass that overrides ``on_train_start``, ``on_fit_end`` or ``on_exception`` calls that of its parent.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the calls for each batch with the monitors that follow."""
        _share_calls(trainer, self)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure; the last monitor gives the row to the loggers."""
        _end_batch([self], trainer, pl_module, outputs, batch, batch_idx)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what still waits for a row."""
        _part(self)
        if _last_monitor(trainer) is self:
            row = _row_of(trainer)
            if row.values:
                row.finish(trainer, is_over=True)
            _rows.pop(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what still waits for a row. Neither other ranks nor a device that may have failed are asked for its place."""
        _part(self)
        if _last_monitor(trainer) is self:
            row = _row_of(trainer)
            if row.values:
                is_alone = trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"
                row.finish(trainer, knows_place=is_alone)
            _rows.pop(trainer, None)

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Measure what there is at the end of a batch, and :func:`publish` it."""

    def __getstate__(self) -> dict[str, Any]:
        # a copy that is made during a fit has its own hooks
        return {name: value for name, value in self.__dict__.items() if name not in BATCH_HOOKS}

    def before_row(self, trainer: Trainer) -> None:
        """:func:`publish` what every row is to have, when one is about to be written. Without a sync or a collective."""

    def place(self, trainer: Trainer) -> dict[str, float]:
        """Where the present step lies on the x axis, if this monitor knows. Called on all ranks alike."""
        return {}

    def recipe(self) -> dict[str, str | float]:
        """The settings that the numbers depend on, for the run's config."""
        return {}


def is_logging_step(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets the step in progress be logged.

    As for ``LightningModule.log``, but that it does not heed ``trainer.should_stop``, which ranks may not agree on: what is
    left then is written when the fit ends.
    """
    if getattr(trainer, "fast_dev_run", False):
        return True
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    # + 1, as it counts the step in progress only when that is over
    return bool(every) and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0


def publish(trainer: Trainer, values: Mapping[str, float], to_loggers: bool = True) -> None:
    """Make values known. To be called by a :class:`Monitor` in ``batch_end``, or in a hook before it in the same batch.

    Costs no device-to-host sync. Call it on every rank, with the same keys: callbacks that monitor them would else disagree.

    Args:
        trainer: the trainer, with or without loggers.
        values: Python numbers by key. They are in ``trainer.callback_metrics`` at once.
        to_loggers: whether the row is to be written in this batch. If not, the values wait for the next row.
    """
    row = _row_of(trainer)
    row.is_due |= to_loggers
    row.values.update(values)
    news = {key: value for key, value in values.items() if row.last.get(key) != value}  # making tensors takes most of the time
    row.last.update(news)
    # not through `trainer.callback_metrics`: reading that turns the metrics of the progress bar into numbers, a sync for each
    connector = trainer._logger_connector
    tensors = torch.tensor(list(news.values()), dtype=torch.float64).unbind()
    connector._callback_metrics.update(zip(news, tensors, strict=True))
    for key in IN_PROGRESS_BAR.keys() & news.keys():
        if not news[key]:
            continue  # a scale of 1 is none
        name, form = IN_PROGRESS_BAR[key]
        connector._progress_bar_metrics[name] = form.format(news[key])  # type: ignore[assignment]  # bars show strings


def publish_histogram(trainer: Trainer, key: str, values: Any) -> None:
    """Add a histogram to the row for Weights & Biases, which makes one of a numpy array of more than 32 values."""
    _row_of(trainer).histograms[key] = values


def update_summary(trainer: Trainer, values: Mapping[str, str | float]) -> None:
    """Put values in the run summary of the loggers that have one (Weights & Biases). On rank 0 only."""
    if not trainer.is_global_zero:
        return  # the experiment of other ranks is a dummy
    for logger in trainer.loggers:
        summary = getattr(getattr(logger, "experiment", None), "summary", None)
        update = getattr(summary, "update", None)
        if callable(update):
            update(dict(values))


def alert(trainer: Trainer, title: str, text: str) -> None:
    """Send an alert through the loggers that can (Weights & Biases). On rank 0 only."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.alert(title=title, text=text, level="WARN")


def describe(trainer: Trainer) -> dict[str, Any]:
    """What a run's numbers depend on, as nested dicts of strings and numbers."""
    plugin = trainer.precision_plugin
    settings = getattr(plugin, "settings", None)
    monitors = {type(monitor).__name__: monitor.recipe() for monitor in _monitors(trainer)}
    return {
        "precision": str(plugin.precision),
        "precision_plugin": settings() if callable(settings) else {"class": type(plugin).__qualname__},
        "strategy": type(trainer.strategy).__name__,
        "world_size": trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "device": device_name(trainer.strategy.root_device),
        "versions": versions(),
        "monitors": {name: recipe for name, recipe in monitors.items() if recipe},
    }


# --- one call for several monitors -------------------------------------------------------------------------------------------

#: Hooks of a callback that Lightning calls for each batch.
BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)


def _share_calls(trainer: Trainer, first: Monitor) -> None:
    """Have Lightning call the first of several neighbouring monitors for each batch, and that one the others.

    Lightning passes over a hook that is None, so those of the others, and those that nobody has, are set to None in the
    instances until the fit ends (:func:`_part`). Nothing happens if ``first`` is not the first of its neighbours.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    position = next((index for index, callback in enumerate(callbacks) if callback is first), None)
    if position is None:
        return  # another callback calls its hooks
    if position and isinstance(callbacks[position - 1], Monitor):
        return
    group = list(itertools.takewhile(lambda callback: isinstance(callback, Monitor), callbacks[position:]))
    for monitor in group:
        _part(monitor)
    for hook in BATCH_HOOKS:
        nothing = getattr(Callback, hook)
        methods = [getattr(monitor, hook) for monitor in group if getattr(type(monitor), hook) is not nothing]
        for monitor in group:
            monitor.__dict__[hook] = None
        if methods:
            first.__dict__[hook] = functools.partial(_call_all, methods)
    if all(type(monitor).on_train_batch_end is Monitor.on_train_batch_end for monitor in group):
        first.__dict__["on_train_batch_end"] = functools.partial(_end_batch, group)


def _end_batch(
    group: list[Monitor], trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
) -> None:
    for monitor in group:
        monitor.batch_end(trainer, pl_module, outputs, batch)
    row = _row_of(trainer)
    if row.is_due and _last_monitor(trainer) is group[-1]:
        row.finish(trainer)


def _call_all(methods: list[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        method(*args)


def _part(monitor: Monitor) -> None:
    """Give a monitor its own hooks back."""
    for hook in BATCH_HOOKS:
        monitor.__dict__.pop(hook, None)


# --- the row -----------------------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    values: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)  # of each key that there ever was
    histograms: dict[str, Any] = field(default_factory=dict)
    is_due: bool = False
    defined: set[tuple[int, str]] = field(default_factory=set)  # metrics by run and key
    described: dict[int, Any] = field(default_factory=dict)  # by run

    def finish(self, trainer: Trainer, is_over: bool = False, knows_place: bool = True) -> None:
        """Give the row to the loggers. With several ranks, all of them have to come here.

        Args:
            trainer: whose loggers get it.
            is_over: whether the last batch is over, and Lightning has counted it.
            knows_place: whether the ranks can tell how many tokens there were.
        """
        for monitor in _monitors(trainer):
            monitor.before_row(trainer)
        if AXIS not in self.values and trainer.loggers and knows_place:  # without it the row would be lost in a chart
            for monitor in _monitors(trainer):
                self.values.update(monitor.place(trainer))
        # the step number that Lightning gives its own rows
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - is_over
        for logger in trainer.loggers:
            values = {key: float(value) for key, value in self.values.items()}
            if isinstance(logger, WandbLogger):
                self._define(trainer, logger)
                logger.log_metrics({**values, **self.histograms}, step)
            elif values:
                logger.log_metrics(values, step)
        self.values, self.histograms, self.is_due = {}, {}, False

    def _define(self, trainer: Trainer, logger: WandbLogger) -> None:
        """Give each metric its x axis and its summary, before it is logged first. By exact names: globs overlap."""
        if not trainer.is_global_zero:
            return
        run: Any = logger.experiment
        description = describe(trainer)  # complete only after some batches
        if self.described.get(id(run)) != description:
            self.described[id(run)] = description
            run.config.update({"lightning_mp": description}, allow_val_change=True)
        for key in (*self.values, *self.histograms):
            if (id(run), key) not in self.defined:
                self.defined.add((id(run), key))
                axis = AXIS if AXIS in self.values and key != AXIS else None
                # its own default is the last value, and only that one stands in the summary under the metric's plain name
                run.define_metric(key, step_metric=axis, summary=SUMMARIES.get(key))


_rows: WeakKeyDictionary[Trainer, _Row] = WeakKeyDictionary()


def _row_of(trainer: Trainer) -> _Row:
    row = _rows.get(trainer)
    if row is None:
        row = _rows[trainer] = _Row()
    return row


def _monitors(trainer: Trainer) -> list[Monitor]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Monitor)]


def _last_monitor(trainer: Trainer) -> Monitor | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in reversed(callbacks) if isinstance(callback, Monitor)), None)
