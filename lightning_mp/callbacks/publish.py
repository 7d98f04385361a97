"""How a callback makes its numbers known: to the loggers, and in ``trainer.callback_metrics``.

``LightningModule.log`` alone would not do. It repeats a value that was logged once in every later row of the epoch, so that a
number that is sampled, or unknown for a while, would look as if it had been measured again. It copies Python numbers to the
device, which makes the host wait, and takes a fraction of a millisecond for each. Here loggers get a value once, at the step
that it belongs to, and ``trainer.callback_metrics``, which ``ModelCheckpoint`` and ``EarlyStopping`` read, keeps the last known
one, on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger


def is_logging_step(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets the step in progress be logged, as for ``LightningModule.log``."""
    return trainer._logger_connector.should_update_logs or bool(getattr(trainer, "fast_dev_run", False))


def publish(trainer: Trainer, values: Mapping[str, float], to_loggers: bool = True) -> None:
    """Put values in ``trainer.callback_metrics`` and, if wanted, in every logger. Call it in ``on_train_batch_end``.

    Costs no device-to-host sync. Call it on every rank, with the same keys: callbacks that monitor them would else disagree.

    Args:
        trainer: the trainer, with or without loggers.
        values: Python numbers by key.
        to_loggers: whether the loggers get them.
    """
    # not through `trainer.callback_metrics`: reading that turns the metrics of the progress bar into numbers, a sync for each
    trainer._logger_connector._callback_metrics.update({key: torch.tensor(float(value)) for key, value in values.items()})
    if to_loggers and values:
        for logger in trainer.loggers:
            log_once(trainer, logger, values)


def log_once(trainer: Trainer, logger: Logger, values: Mapping[str, Any]) -> None:
    """Give one logger values in the row of the step in progress: the step number that Lightning gives its own."""
    logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)  # type: ignore[arg-type]


def log_histogram(trainer: Trainer, key: str, values: Any) -> None:
    """Log a histogram to Weights & Biases, which makes one of a numpy array of more than 32 values. Others get nothing."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            log_once(trainer, logger, {key: values})


def update_summary(trainer: Trainer, values: Mapping[str, str | float]) -> None:
    """Put values in the run summary of the loggers that have one (Weights & Biases). On rank 0 only."""
    if not trainer.is_global_zero:
        return  # the experiment of other ranks is a dummy
    for logger in trainer.loggers:
        summary = getattr(getattr(logger, "experiment", None), "summary", None)
        update = getattr(summary, "update", None)
        if callable(update):
            update(dict(values))
