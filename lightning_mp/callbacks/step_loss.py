"""The true loss of each optimizer step, and what had been consumed by then, on all ranks together.

*The true loss* of a step is the mean over its micro-batches (the window) and over the ranks, in fp32. In automatic optimization
Lightning divides the loss by ``accumulate_grad_batches`` before callbacks see it; it is multiplied back here.

*A step* is a batch in which an optimizer stepped. Several optimizers that step in one batch (manual optimization) are one step;
``trainer.global_step`` counts each of them. A step that loss scaling skipped counts too: it consumed tokens.

*Reading.* Between log steps there is no device-to-host sync and no collective: losses stay on the device as they are, and
counts are Python numbers, or stay there too if an attention mask has to be counted. At a log step all of them are read
together, in one sync; with several ranks one all-reduce follows. Which steps are log steps is decided by counters that are
equal on all ranks, and DDP has met in the backward of that very step, so no rank waits for one that has no batch left. What is
unread is bounded: it is read at the latest after :data:`MOST_UNREAD` steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_mp.callbacks.publish import is_logging_step
from lightning_mp.callbacks.tokens import BatchCount

#: So many steps are unread at the most.
MOST_UNREAD = 1000
#: So many 0-dim tensors become one tensor; each takes a block of the allocator (512 bytes on CUDA) as long as it stands alone.
PACK = 256
NAN = float("nan")


class StepLoss(NamedTuple):
    """One optimizer step.

    Attributes:
        step: counted from 1 since the run began; goes on after a resume.
        loss: mean over the window and over ranks; None if `training_step` gave none on any rank, or if it was not finite and
            the precision plugin skipped the step for that.
        samples: consumed by all ranks since the run began, this step included; None if unknown.
        tokens: likewise, without padding where it is known.
    """

    step: int
    loss: float | None
    samples: int | None
    tokens: int | None


#: A finished step whose values are still unread: how many losses there are on the device, a factor for each, samples, tokens
#: beside those on the device, and how many counts of tokens there are on the device.
_Window: TypeAlias = tuple[int, float, "int | None", "int | None", int]


class StepLosses:
    """Takes micro-batches in, and gives the steps that they make up; a callback calls it from its hooks.

    Attributes:
        step: steps that are finished, unread ones included.
        nonfinite_skipped: steps that the precision plugin skipped because the loss was not finite.
        joined_late: whether the run had steps before this object knew of it, so that totals are unknown.
    """

    def __init__(self) -> None:
        self.step = 0
        self.nonfinite_skipped = 0
        self.joined_late = False
        self._read_step = 0
        self._samples: int | None = 0
        self._tokens: int | None = 0
        self._global_step = 0
        self._has_loaded = False
        self._forget_unread()

    def _forget_unread(self) -> None:
        self._windows: list[_Window] = []
        self._losses = _Scalars(torch.float32)
        self._counts = _Scalars(torch.int64)
        self._is_due = False
        self._count: BatchCount | None = None
        self._count_tokens: Callable[[Any], int | Tensor | None] | None = None
        self._open_window()

    def _open_window(self) -> None:
        self._window_losses = self._window_device_tokens = 0
        self._window_samples: int | None = 0
        self._window_tokens: int | None = 0

    def is_continued_by(self, trainer: Trainer) -> bool:
        """Whether a fit that is being set up goes on from the steps that this object has seen."""
        return 0 < trainer.global_step == self._global_step

    def misses_steps_of(self, trainer: Trainer) -> bool:
        """Whether the fit that begins goes on from steps that neither this object nor a checkpoint of it has seen."""
        return not self._has_loaded and trainer.global_step != self._global_step

    def start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin or go on; to be called in ``on_train_start``."""
        self._forget_unread()
        if self.misses_steps_of(trainer):
            self.joined_late = True
            self._samples = self._tokens = None
            # with several optimizers, as if all of them had stepped in each step
            self.step = self._read_step = trainer.global_step // max(len(trainer.optimizers), 1)
        self._has_loaded = False
        self._global_step = trainer.global_step
        self._nonfinite = getattr(trainer.precision_plugin, "nonfinite_losses", 0)
        self._count_tokens = getattr(pl_module, "count_tokens", None)

    def batch_start(self, count: BatchCount, batch: Any) -> None:
        """Take the size of a batch, before `training_step` can change the batch. No sync."""
        self._count = count
        if self._count_tokens is not None:
            tokens = self._count_tokens(batch)
            self._count = count._replace(tokens=tokens if tokens is None or isinstance(tokens, Tensor) else int(tokens))

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> bool:
        """Add the micro-batch to the window, and close the window if an optimizer stepped. No sync.

        Returns:
            Whether the steps are to be read now. Equal on all ranks.
        """
        if self._count is None:
            return False  # the loader gave None for a batch
        is_automatic = pl_module.automatic_optimization
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # what manual optimization returns is the user's own tensor, which may be written to again
            loss = loss.detach() if is_automatic else loss.detach().clone()
            self._losses.append(loss if loss.ndim == 0 else loss.to(torch.float32).mean())  # integers have no mean
            self._window_losses += 1
        self._add_count(self._count)
        self._count = None
        self._is_due = self._is_due or is_logging_step(trainer)  # also if no optimizer stepped: the next step then is
        global_step = trainer.global_step
        if global_step == self._global_step:
            return False  # still accumulating
        self._global_step = global_step
        self._close(trainer, trainer.accumulate_grad_batches if is_automatic else 1)
        return self._is_due or len(self._windows) >= MOST_UNREAD

    def _add_count(self, count: BatchCount) -> None:
        if count.samples is None or self._window_samples is None:
            self._window_samples = None
        else:
            self._window_samples += count.samples
        if isinstance(count.tokens, Tensor):
            self._counts.append(count.tokens.detach().sum() if count.tokens.ndim else count.tokens.detach())
            self._window_device_tokens += 1
        elif count.tokens is None or self._window_tokens is None:
            self._window_tokens = None
        else:
            self._window_tokens += count.tokens

    def _close(self, trainer: Trainer, factor: float) -> None:
        nonfinite = getattr(trainer.precision_plugin, "nonfinite_losses", 0)
        if nonfinite > self._nonfinite:
            self.nonfinite_skipped += 1
            factor = 0.0  # a loss without effect on the weights
        self._nonfinite = nonfinite
        self.step += 1
        self._windows.append(
            (self._window_losses, factor, self._window_samples, self._window_tokens, self._window_device_tokens)
        )
        self._open_window()

    def read(self, trainer: Trainer, message: float = 0.0) -> tuple[list[StepLoss], float]:
        """The steps that are finished and were not read before.

        One device-to-host sync. With several ranks one all-reduce, whose result is a second sync: all of them have to come
        here alike.

        Args:
            trainer: the trainer.
            message: a number that rank 0 has for all ranks.

        Returns:
            The steps, the same on all ranks, and rank 0's message; 0 if there are no steps.
        """
        self._is_due = False
        windows, self._windows = self._windows, []
        if not windows:
            return [], 0.0
        # of a window that is still open, counts and losses stay where they are
        losses, counts = self._losses.take(self._window_losses), self._counts.take(self._window_device_tokens)
        exact = exact_dtype(losses.device)
        values = torch.cat([losses.to(exact), counts.to(losses.device, exact)]).tolist()
        at, counts_at = 0, len(losses)
        columns: list[float] = []  # four for each step: mean loss, whether there is one, samples, tokens; NaN if unknown
        for number, factor, samples, tokens, device_tokens in windows:
            is_known = number > 0 and factor > 0.0
            total = values[at] if number == 1 else sum(values[at : at + number])
            at += number
            if device_tokens:
                masked = sum(values[counts_at : counts_at + device_tokens])
                counts_at += device_tokens
                tokens = None if tokens is None else tokens + round(masked)
            columns += (
                total / number * factor if is_known else 0.0,
                is_known,
                NAN if samples is None else samples,
                NAN if tokens is None else tokens,
            )
        if trainer.world_size > 1:
            *columns, message = self._meet(trainer, columns, message)
        share = data_replicas(trainer) / trainer.world_size
        rows = zip(columns[::4], columns[1::4], columns[2::4], columns[3::4], strict=True)
        return [self._finish(*row, share) for row in rows], message

    def _meet(self, trainer: Trainer, columns: list[float], message: float) -> list[float]:
        device = trainer.strategy.root_device
        mine = torch.tensor([*columns, message if trainer.is_global_zero else 0.0], device=device, dtype=exact_dtype(device))
        return trainer.strategy.reduce(mine, reduce_op="sum").tolist()

    def _finish(self, total: float, ranks: float, samples: float, tokens: float, share: float) -> StepLoss:
        """A step of the sums over ranks."""
        self._read_step += 1
        self._samples = None if self._samples is None or samples != samples else self._samples + round(samples * share)
        self._tokens = None if self._tokens is None or tokens != tokens else self._tokens + round(tokens * share)
        return StepLoss(self._read_step, total / ranks if ranks else None, self._samples, self._tokens)

    def leave(self) -> None:
        """Keep no tensor and nothing of the module. A fit whose last steps were never read is not gone on from."""
        if self._windows:
            self._global_step = -1
        self._forget_unread()

    def state_dict(self) -> dict[str, Any]:
        """The totals of the steps that were read, so read before saving.

        Keys: ``step``, ``samples``, ``tokens``, ``nonfinite_skipped``, ``joined_late``.
        """
        return {
            "step": self._read_step,
            "samples": self._samples,
            "tokens": self._tokens,
            "nonfinite_skipped": self.nonfinite_skipped,
            "joined_late": self.joined_late,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self.step = self._read_step = state_dict["step"]
        self._samples, self._tokens = state_dict["samples"], state_dict["tokens"]
        self.nonfinite_skipped, self.joined_late = state_dict["nonfinite_skipped"], state_dict["joined_late"]
        self._has_loaded = True


class _Scalars:
    """Tensors of no dimensions that stay on their device until they are read together."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._loose: list[Tensor] = []
        self._packed: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        if value.dtype is not self._dtype:
            value = value.to(self._dtype)
        self._loose.append(value)
        if len(self._loose) >= PACK:
            self._pack()

    def take(self, but: int) -> Tensor:
        """All of them but the last so many, in one tensor on their device."""
        if self._loose:
            self._pack()
        packed, self._packed = self._packed, []
        values = torch.cat(packed) if packed else torch.zeros(0, dtype=self._dtype)
        if but:
            self._packed.append(values[-but:])
            values = values[:-but]
        return values

    def _pack(self) -> None:
        self._packed.append(torch.stack(self._loose))
        self._loose = []


def read_before_saving(trainer: Trainer, read: Callable[[], object]) -> None:
    """Have ``read`` called on all ranks before any checkpoint is saved, until ``trainer.save_checkpoint`` is restored.

    In ``state_dict`` it would be too late to ask other ranks: a user may call that on one of them.
    """
    save = trainer.save_checkpoint

    @functools.wraps(save)
    def read_and_save(*args: Any, **kwargs: Any) -> None:
        read()
        save(*args, **kwargs)

    trainer.save_checkpoint = read_and_save  # type: ignore[method-assign]


def data_replicas(trainer: Trainer) -> int:
    """How many ranks see data of their own; the others share the work on the same batches."""
    if trainer.world_size == 1:
        return 1
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size))


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype that holds counts exactly; mps has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
