"""Measure how fast a run trains, where the time of a step goes, and how much of the device it uses.

**What a step is.** An optimizer step, with all the micro-batches that it accumulates. Its time runs from the end of the step
before to its own end: waiting for data, forward and backward, the optimizer, and what callbacks and loggers do between
batches. Not in it are *pauses*: validation, sanity checking, saving a checkpoint, and the boundary of an epoch. After a pause
the clock begins anew, so a validation of any length changes nothing. What comes right after (cold caches, workers that start)
is warm-up.

**Clocks.** On CUDA the marks are events in the stream, read at log steps, so nothing waits for the device in between, and a
time is what the device saw: waiting for data counts only where the device had nothing else to do. On other devices it is the
host's clock. See :mod:`lightning_mp.callbacks.clock`.

**Tokens** are counted from the batches, never assumed. Their sizes are known on the host; where padding has to be told apart,
the mask is counted on the device and the counts are read together at log steps. See :mod:`lightning_mp.callbacks.tokens`.

**Between log steps** there is no device-to-host sync and no collective: three marks and a count of each batch. A log step
reads the counts (one sync; on CUDA one more for the events) and, with several ranks, makes one all-reduce. Which steps are
log steps is decided by counters that are equal on all ranks, and DDP has met in the backward of that very step, so no rank
waits for one that has no batch left. Saving a checkpoint does the same once more, as the totals in it are those of all ranks.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.callbacks.clock import Clock, clock_for
from lightning_mp.callbacks.publish import Monitor, is_logging_step, publish
from lightning_mp.callbacks.step_loss import data_replicas, exact_dtype
from lightning_mp.callbacks.tokens import BatchCount, count_batch
from lightning_mp.cost.roofline import FlopCount, is_compiled, matmul_format, peak_tflops
from lightning_mp.cost.throughput import StepFlops, TimedStep, summarise, usable

PREFIX = "throughput"
#: Summed over the ranks that see different data.
DATA_RATES = ("tokens_per_s", "samples_per_s", "padded_tokens_per_s")
#: Averaged over ranks.
MEANS = ("step_time_ms", "step_time_p95_ms", "data_wait_ms", "forward_backward_ms", "optimizer_ms", "mfu", "remaining_s")
NAMES = (*DATA_RATES, "tflops_per_s", *MEANS)
TOTALS = ("tokens", "samples")
#: Counts on the device that belong to no step in the window are added up once there are this many.
EARLY_COUNTS = 1024

Count = Callable[[Any], "int | Tensor | None"]


class SpeedMonitor(Monitor):
    """Logs throughput, the time of a step and its parts, and the share of the device's peak that is used.

    ==================================  ==================================================================================
    key                                 meaning
    ==================================  ==================================================================================
    ``throughput/tokens_per_s``         tokens of all ranks over the window, per second; without padding where it is known
    ``throughput/samples_per_s``        samples of all ranks, per second
    ``throughput/padded_tokens_per_s``  tokens with padding, per second, if an attention mask tells padding apart
    ``throughput/tflops_per_s``         10^12 floating-point operations of all ranks, per second
    ``throughput/*_per_s_per_device``   each of these four divided by the number of ranks, if there are several
    ``throughput/step_time_ms``         time of an optimizer step: median of the window
    ``throughput/step_time_p95_ms``     its 95th percentile
    ``throughput/data_wait_ms``         mean time of a step between its batches: the loader, the copy to the device, and what
                                        loggers and other callbacks do there
    ``throughput/forward_backward_ms``  mean time of a step from the start of a batch to ``on_before_optimizer_step``
    ``throughput/optimizer_ms``         mean time of a step from there to the end of the batch: clipping, the step, the
                                        learning-rate schedule
    ``throughput/mfu``                  tflops_per_s of a device over its dense peak in the format of matrix products, 0 to 1
    ``throughput/tokens``               tokens so far, on all ranks, since the run began; goes on after a resume
    ``throughput/samples``              samples so far, likewise
    ``throughput/remaining_s``          training time that is left at the present pace, without validation, by the first of
                                        ``max_steps``, ``max_epochs`` and ``max_time`` that will be reached
    ==================================  ==================================================================================

    Values are published at log steps (``log_every_n_steps``), at the end of an optimizer step, in the loggers and in
    ``trainer.callback_metrics``; they are the same on all ranks. Times are means over ranks. What is unknown is left out:
    rates before two steps have passed after the warm-up, tokens of batches without integers, the optimizer's part of steps
    that were skipped or where several optimizers stepped in one batch. Such a batch counts as several steps, as in
    ``trainer.global_step``, and its time is divided by their number.

    The first ``warmup_steps`` of a fit are left out of rates and times, and so is the first step after a pause, unless fewer
    than two others are in the window (with a validation at every step there are none). Put the monitor first among the
    callbacks, so that what others do at the end of a batch does not count as the optimizer's.

    FLOPs are measured once, on the first batch of a fit, while it goes forward and backward as usual: what torch's counter
    knows, see :mod:`lightning_mp.cost.roofline`. They are scaled to other batches by their tokens with padding, or else by
    their samples. Compiled layers, tensor parallelism, and ``nn.Bilinear`` under autocast cannot be measured so: pass
    ``flops_per_token`` or ``flops_per_step``. While they are counted, an operation that torch makes of others in one kernel may
    differ in its last bits (``F.bilinear`` under autocast; the backward of ``Tensor.prod``).

    Args:
        window: the rates and times are of the last so many optimizer steps.
        warmup_steps: the first steps of a fit, which are left out.
        tokens: counts the tokens of a batch: an int, a 0-dim tensor, or None if unknown. It should not read from the device. A
            method ``count_tokens(batch)`` of the module wins over it. Default:
            :func:`~lightning_mp.callbacks.tokens.count_batch`.
        samples: counts the samples of a batch, likewise.
        flops_per_token: FLOPs of forward and backward for each token (without padding, if it is known).
        flops_per_step: FLOPs of one optimizer step on one device, instead.
        peak_tflops: the dense peak of the device in TFLOP/s, for a device that is not in the table.

    Raises:
        ValueError: an argument is out of range, or FLOPs are given twice; in the first batch, what one's own function returned
            is no count.

    Its ``state_dict`` holds ``tokens`` and ``samples``, ints, each if it is known.

    Example:
        >>> from lightning_mp import SpeedMonitor, Trainer
        >>> trainer = Trainer(
        ...     precision_plugin="bf16-master", callbacks=[SpeedMonitor(window=20)], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False,
        ... )
    """

    def __init__(
        self,
        window: int = 50,
        warmup_steps: int = 3,
        *,
        tokens: Count | None = None,
        samples: Count | None = None,
        flops_per_token: float | None = None,
        flops_per_step: float | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        for name, count, least in (("window", window, 2), ("warmup_steps", warmup_steps, 0)):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"{name}={count!r} must be a whole number, {least} or more.")
        given = {"flops_per_token": flops_per_token, "flops_per_step": flops_per_step, "peak_tflops": peak_tflops}
        for name, value in given.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} must be a number above 0, or None.")
        if flops_per_token is not None and flops_per_step is not None:
            raise ValueError(
                f"flops_per_token={flops_per_token!r} and flops_per_step={flops_per_step!r} say the same thing twice. Pass one."
            )
        for name, counter in (("tokens", tokens), ("samples", samples)):
            if counter is not None and not callable(counter):
                raise ValueError(f"{name}={counter!r} must be a function of a batch that returns its {name}, or None.")
        self.window = window
        self.warmup_steps = warmup_steps
        self._count_tokens_option = tokens
        self._count_samples_option = samples
        self._given_flops = _given_flops(flops_per_token, flops_per_step)
        self._given_peak = peak_tflops
        self._totals: dict[str, int] = dict.fromkeys(TOTALS, 0)  # of all ranks, when they last met
        self._local: dict[str, int] = dict.fromkeys(TOTALS, 0)  # of this rank since then, as far as it is read
        self._unknown: set[str] = set()
        self._global_step = 0
        self._has_loaded = False
        self._recipe: dict[str, str | float] = {}
        self._reset()

    def _reset(self) -> None:
        """Forget what belongs to one fit. Totals stay."""
        self._clock: Clock | None = None
        self._timed: deque[TimedStep] = deque(maxlen=self.window)
        self._unread: deque[_Step] = deque()
        self._early: list[Tensor] = []  # counts of steps that fell out of the window unread
        self._step = _Step()
        self._steps_seen = 0
        self._is_due = False
        self._gap: Any = None  # where the time between batches began
        self._start: Any = None  # where the batch began, while one is under way
        self._before_step: Any = None
        self._optimizer_steps_in_batch = 0
        self._flops: StepFlops | None = self._given_flops
        self._flop_count: FlopCount | None = None
        self._peak: float | None = None
        self._count_tokens: Count | None = None
        self._timers: list[Timer] = []

    # --- the life of a fit -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose clock and counters, look the device up, and take up the totals."""
        super().on_train_start(trainer, pl_module)
        self._reset()
        self._take_up_totals(trainer)
        self._global_step = trainer.global_step
        self._clock = clock_for(pl_module.device)
        self._gap = self._clock.mark()
        self._timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
        self._count_tokens = self._choose_count(pl_module)
        self._peak = self._look_up_peak(trainer, pl_module.device)
        self._recipe.update(window=self.window, warmup_steps=self.warmup_steps)
        self._watch_saving(trainer)
        if self._flops is None and self._can_count_flops(trainer, pl_module):
            self._flop_count = FlopCount()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch boundary is a pause."""
        self._after_pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is a pause."""
        self._after_pause()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mark the start of the batch. On the first one of a fit, have its FLOPs counted."""
        if self._flop_count is not None:
            _count_in(trainer.strategy, self._flop_count)
        if self._clock is not None:
            self._before_step, self._optimizer_steps_in_batch = None, 0
            self._start = self._clock.mark()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Mark the end of backward."""
        self._optimizer_steps_in_batch += 1
        if self._before_step is None and self._clock is not None:
            self._before_step = self._clock.mark()

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Close the batch, and the step if an optimizer stepped; at log steps, publish."""
        if self._clock is None or self._start is None:
            return  # the loader gave None for a batch
        end = self._clock.mark()
        step = self._step
        step.batches.append((self._gap, self._start, self._before_step, self._optimizer_steps_in_batch, end))
        self._gap, self._start = end, None
        count = self._count(batch)
        self._add(step, count)
        if self._flop_count is not None:
            self._take_flops(trainer, count)
        if not self._is_due and is_logging_step(trainer):
            self._is_due = True  # also if no optimizer stepped in this batch: the next that does
        global_step = trainer.global_step
        if global_step == self._global_step:
            return  # still accumulating
        self._close(step, global_step)
        if self._is_due:
            self._is_due = False
            self._publish(trainer)

    def place(self, trainer: Trainer) -> dict[str, float]:
        """The totals by now. Reads counts that are on the device; one all-reduce if there are several ranks."""
        self._share_totals(trainer)
        return {f"{PREFIX}/{name}": float(self._totals[name]) for name in TOTALS if name not in self._unknown}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what is left, so that the totals are complete and no tensor is kept.

        With one process they make a last row. Of several, one may still be training: there is no meeting here.
        """
        self._settle()
        if trainer.world_size == 1 and any(self._local.values()):
            publish(trainer, self.place(trainer), to_loggers=False)
        self._unread.clear()
        self._let_go_of_marks()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave trainer and strategy as they were. Nothing is read from a device that may have failed."""
        super().on_exception(trainer, pl_module, exception)
        self._leave(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave trainer and strategy as they were."""
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        trainer.__dict__.pop("save_checkpoint", None)
        _stop_counting_in(trainer.strategy)
        self._let_go_of_marks()

    def _let_go_of_marks(self) -> None:
        """Keep no events, which cannot be copied or pickled, and nothing of the module. Counts that are unread stay."""
        self._clock = self._gap = self._start = self._before_step = self._count_tokens = None
        for step in (*self._unread, self._step):
            step.batches.clear()
            step.pauses.clear()

    # --- pauses ------------------------------------------------------------------------------------------------------------

    def _after_pause(self) -> None:
        """Begin anew between batches, and keep the step that follows out of the rates."""
        if self._clock is not None:
            self._gap = self._clock.mark()
            self._step.is_regular = False

    def _watch_saving(self, trainer: Trainer) -> None:
        """Treat a saved checkpoint as a pause. No hook tells when saving ends, nor of checkpoints of weights only."""
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_as_a_pause(*args: Any, **kwargs: Any) -> None:
            begin = self._clock.mark() if self._clock is not None and self._start is not None else None
            self._share_totals(trainer)
            try:
                save(*args, **kwargs)
            finally:
                if begin is not None and self._clock is not None:  # by the user, within a batch
                    self._step.is_regular = False
                    self._step.pauses.append((begin, self._clock.mark()))
                else:
                    self._after_pause()

        trainer.save_checkpoint = save_as_a_pause  # type: ignore[method-assign]

    # --- steps -------------------------------------------------------------------------------------------------------------

    def _add(self, step: _Step, count: BatchCount) -> None:
        """Add a batch to the step and to the totals."""
        tokens, positions, samples, is_padding_known, *_ = count
        if isinstance(tokens, Tensor):
            step.device_tokens.append(tokens)
        elif tokens is None:
            step.tokens = None
            self._end_total("tokens")
        else:
            self._local["tokens"] += tokens
            if step.tokens is not None:
                step.tokens += tokens
        if samples is None:
            step.samples = None
            self._end_total("samples")
        else:
            self._local["samples"] += samples
            if step.samples is not None:
                step.samples += samples
        step.positions = None if positions is None or step.positions is None else step.positions + positions
        step.is_padding_known = step.is_padding_known and is_padding_known

    def _end_total(self, name: str) -> None:
        """A total without one batch is none. Say so if there was one."""
        if name not in self._unknown:
            self._unknown.add(name)
            if self._totals[name] or self._local[name]:
                rank_zero_info(f"SpeedMonitor logs no {PREFIX}/{name} any more, as a batch came whose {name} are not known.")

    def _close(self, step: _Step, global_step: int) -> None:
        """Put a finished step in line to be read, and let go of the one that the window has no place for."""
        step.optimizer_steps = max(global_step - self._global_step, 1)
        self._global_step = global_step
        self._steps_seen += 1
        step.is_warm_up = self._steps_seen <= self.warmup_steps
        self._unread.append(step)
        self._step = _Step()
        if len(self._unread) > self.window:
            old = self._unread.popleft()
            assert self._clock is not None
            self._clock.release(old.marks())
            self._early.extend(old.device_tokens)
            if len(self._early) >= EARLY_COUNTS:
                self._early = [torch.stack(self._early).sum()]

    def _settle(self) -> None:
        """Turn the counts that are still on the device into numbers. One device-to-host sync if there are any."""
        steps = [*self._unread, self._step]
        numbers = iter(_read([*self._early, *(count for step in steps for count in step.device_tokens)]))
        self._local["tokens"] += sum(next(numbers) for _ in self._early)
        self._early = []
        for step in steps:
            if not step.device_tokens:
                continue
            tokens = sum([next(numbers) for _ in step.device_tokens])
            step.device_tokens = []
            self._local["tokens"] += tokens
            if step.tokens is not None:
                step.tokens += tokens

    def _read_steps(self) -> None:
        """Read counts and times of the steps that are in line."""
        self._settle()
        steps = list(self._unread)
        self._unread.clear()
        if self._clock is None or not steps:
            return
        self._clock.wait_for(steps[-1].batches[-1][-1])
        for step in steps:
            if not step.is_warm_up:
                self._timed.append(step.timed(self._clock))
            self._clock.release(step.marks())

    # --- publishing --------------------------------------------------------------------------------------------------------

    def _publish(self, trainer: Trainer) -> None:
        """Read what is unread, put the ranks' values together, and make them known."""
        self._read_steps()
        steps = usable(self._timed)
        own = summarise(steps, self._flops)
        if self._peak is not None and "tflops_per_s" in own:
            own["mfu"] = own["tflops_per_s"] / self._peak
        remaining = self._remaining_s(trainer, steps)
        if remaining is not None:
            own["remaining_s"] = remaining
        values = self._combine(trainer, own)
        values.update({name: float(self._totals[name]) for name in TOTALS if name not in self._unknown})
        publish(trainer, {f"{PREFIX}/{name}": value for name, value in values.items()}, to_loggers=True)

    def _combine(self, trainer: Trainer, own: dict[str, float]) -> dict[str, float]:
        """The values of all ranks together, those that every rank knows. One all-reduce if there are several."""
        mine = [own.get(name, 0.0) for name in NAMES] + [float(name in own) for name in NAMES]
        summed = self._meet(trainer, mine)
        ranks, replicas = trainer.world_size, data_replicas(trainer)
        values: dict[str, float] = {}
        for index, name in enumerate(NAMES):
            if summed[len(NAMES) + index] < ranks:
                continue
            value = summed[index]
            if name in MEANS:
                values[name] = value / ranks
                continue
            if name in DATA_RATES:
                value *= replicas / ranks  # ranks that share the work on a batch count it each
            values[name] = value
            if ranks > 1:
                values[f"{name}_per_device"] = value / ranks
        return values

    def _share_totals(self, trainer: Trainer) -> None:
        """Add what the ranks counted since they last met to the totals of all of them."""
        self._settle()
        self._meet(trainer, [])

    def _meet(self, trainer: Trainer, values: list[float]) -> list[float]:
        """Sum values over ranks, and the totals with them: one all-reduce if there are several ranks, else none."""
        mine = [*values, *(float(self._local[name]) for name in TOTALS), *(float(name in self._unknown) for name in TOTALS)]
        if trainer.world_size > 1:
            device = trainer.strategy.root_device
            mine = trainer.strategy.reduce(
                torch.tensor(mine, dtype=exact_dtype(device), device=device), reduce_op="sum"
            ).tolist()
        counts, unknown = mine[len(values) : -len(TOTALS)], mine[-len(TOTALS) :]
        for name, count, flag in zip(TOTALS, counts, unknown, strict=True):
            self._totals[name] += round(count * data_replicas(trainer) / trainer.world_size)
            self._local[name] = 0
            if flag:
                self._unknown.add(name)
        return mine[: len(values)]

    def _remaining_s(self, trainer: Trainer, steps: Sequence[TimedStep]) -> float | None:
        """Seconds of training that are left by the limit that comes first, or None if there is no limit or no pace."""
        limits = [left for timer in self._timers if (left := timer.time_remaining()) is not None]
        seconds = sum(step.time_ms for step in steps) / 1e3
        if seconds > 0:
            if trainer.max_steps != -1:
                limits.append((trainer.max_steps - trainer.global_step) * seconds / sum(s.optimizer_steps for s in steps))
            batches = trainer.num_training_batches
            if trainer.max_epochs not in (None, -1) and batches != float("inf"):
                done = trainer.current_epoch * batches + trainer.fit_loop.batch_idx + 1
                limits.append((trainer.max_epochs * batches - done) * seconds / sum(s.batches for s in steps))
        return max(min(limits), 0.0) if limits else None

    # --- counting ----------------------------------------------------------------------------------------------------------

    def _choose_count(self, pl_module: LightningModule) -> Count | None:
        own: Count | None = getattr(pl_module, "count_tokens", None)
        if own is not None and self._count_tokens_option is not None:
            rank_zero_warn(
                f"SpeedMonitor(tokens=...) has no effect, as {type(pl_module).__name__} counts its tokens itself. Remove the"
                " option, or the module's method count_tokens."
            )
        chosen = own or self._count_tokens_option
        if chosen is not None:
            self._recipe["tokens_counted_by"] = "count_tokens of the module" if own is not None else "the option tokens"
        return chosen

    def _count(self, batch: Any) -> BatchCount:
        count = count_batch(batch)
        if self._count_tokens is not None:
            count = count._replace(tokens=_checked(self._count_tokens(batch), self._recipe["tokens_counted_by"]))
        elif "tokens_counted_by" not in self._recipe:
            self._recipe["tokens_counted_by"] = count.source
            if count.ignored_mask is not None:
                rank_zero_info(
                    f"SpeedMonitor counts padding as tokens, as the batch's attention_mask ({count.ignored_mask}) is not an"
                    " integer or boolean one of the shape of input_ids. Count with SpeedMonitor(tokens=...), or the module's"
                    " method count_tokens."
                )
        if self._count_samples_option is not None:
            samples = _checked(self._count_samples_option(batch), "the option samples")
            count = count._replace(samples=int(samples) if samples is not None else None)
        return count

    # --- FLOPs -------------------------------------------------------------------------------------------------------------

    def _can_count_flops(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Whether torch's counter would see this run's work; say so if not."""
        reason = None
        if is_compiled(pl_module):
            reason = "layers are compiled"
        elif "32-true" not in str(trainer.precision_plugin.precision) and _has_bilinear(pl_module):
            # torch computes its inner products outside of autocast while they are counted, with other bits
            reason = "nn.Bilinear runs under autocast"
        elif data_replicas(trainer) != trainer.world_size:
            reason = "ranks share the work on a batch"
        if reason is not None:
            rank_zero_info(
                f"SpeedMonitor logs no tflops_per_s and no mfu, as FLOPs cannot be counted while {reason}. Pass"
                " flops_per_token=... or flops_per_step=..."
            )
        return reason is None

    def _take_flops(self, trainer: Trainer, count: BatchCount) -> None:
        """Take the FLOPs that were counted in this batch, for each unit of it that is known."""
        counted, self._flop_count = self._flop_count, None
        assert counted is not None
        _stop_counting_in(trainer.strategy)
        self._step.is_regular = False  # counting takes time
        if trainer.lightning_module.automatic_optimization and "backward" not in counted.blocks:
            self._flop_count = FlopCount()  # `training_step` returned None: try the next batch
            return
        flops = counted.flops
        if not flops:
            rank_zero_info(
                "SpeedMonitor logs no tflops_per_s and no mfu, as the first batch had no matrix product, convolution or"
                " attention that torch's counter knows. Pass flops_per_token=... or flops_per_step=..."
            )
            return
        for unit, size in (("position", count.positions), ("sample", count.samples), ("batch", 1)):
            if size:
                self._flops = StepFlops(flops / size, unit)
                break
        self._describe_flops("counted on one batch")

    def _describe_flops(self, source: str) -> None:
        if self._flops is not None:
            self._recipe[f"flops_per_{self._flops.unit}"] = float(self._flops.amount)
            self._recipe["flops_source"] = source

    def _look_up_peak(self, trainer: Trainer, device: torch.device) -> float | None:
        """The device's peak in TFLOP/s, given or from the table; if there is none, say so."""
        self._recipe = {name: value for name, value in self._recipe.items() if name == "tokens_counted_by"}
        self._describe_flops("given")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        precision = str(trainer.precision_plugin.precision)
        fmt = matmul_format(precision, device)
        self._recipe.update(device=name, **({} if fmt is None else {"format": fmt}))
        found = (self._given_peak, "given") if self._given_peak is not None else fmt and peak_tflops(name, fmt)
        if not found:
            what = f"in {fmt}" if fmt else f"under precision {precision!r}"
            rank_zero_info(
                f"SpeedMonitor logs no mfu, as the peak FLOP/s of {name!r} {what} is not known. Pass peak_tflops=..., the dense"
                " peak of the device in TFLOP/s, if you know it."
            )
            return None
        peak, source = found
        self._recipe.update(peak_tflops=float(peak), peak_source=source)
        return float(peak)

    def recipe(self) -> dict[str, str | float]:
        """How the numbers are made, for the config of a run: plain strings and numbers. Complete after the first step.

        Returns:
            ``window``, ``warmup_steps``, ``device`` (its name), and what is known of ``tokens_counted_by``, ``format`` (of
            matrix products), ``peak_tflops`` (the denominator of MFU) and ``peak_source``, and ``flops_per_position``,
            ``flops_per_sample``, ``flops_per_batch``, ``flops_per_token`` or ``flops_per_step`` with ``flops_source``.
        """
        return dict(self._recipe)

    # --- totals ------------------------------------------------------------------------------------------------------------

    def _take_up_totals(self, trainer: Trainer) -> None:
        """Go on with totals that belong to this run's steps, or begin at zero; else they are unknown."""
        if self._has_loaded:
            self._has_loaded = False
        elif trainer.global_step == 0:
            self._totals, self._local, self._unknown = dict.fromkeys(TOTALS, 0), dict.fromkeys(TOTALS, 0), set()
        elif trainer.global_step != self._global_step:
            self._unknown.update(TOTALS)
            rank_zero_info(
                f"SpeedMonitor logs no {PREFIX}/tokens and no {PREFIX}/samples, as the run goes on from step"
                f" {trainer.global_step} of a checkpoint that does not say how many there were. Rates are not concerned."
            )

    def state_dict(self) -> dict[str, Any]:
        """The totals that are known. Reads counts that are still on the device: one sync at most.

        With several ranks these are the totals of all of them as ``trainer.save_checkpoint`` has just put them together.
        """
        self._settle()
        return {name: self._totals[name] + self._local[name] for name in TOTALS if name not in self._unknown}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self._totals = {name: int(state_dict.get(name, 0)) for name in TOTALS}
        self._local = dict.fromkeys(TOTALS, 0)
        self._unknown = {name for name in TOTALS if name not in state_dict}
        self._has_loaded = True


@dataclass
class _Step:
    """The batches of one optimizer step, as marks that are still unread."""

    #: gap began, batch began, first optimizer step began or None, how many there were, batch ended
    batches: list[tuple[Any, Any, Any, int, Any]] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)  # within a batch
    device_tokens: list[Tensor] = field(default_factory=list)
    tokens: int | None = 0  # beside those on the device
    positions: int | None = 0
    samples: int | None = 0
    is_padding_known: bool = True
    optimizer_steps: int = 1
    is_regular: bool = True
    is_warm_up: bool = False

    def marks(self) -> Iterable[Any]:
        """The marks that nobody else reads; the end of a batch is the start of the next gap."""
        for gap, start, before_step, _, _ in self.batches:
            yield from (gap, start) if before_step is None else (gap, start, before_step)

    def timed(self, clock: Clock) -> TimedStep:
        """The step in milliseconds."""
        between = clock.milliseconds
        wait = whole = optimizer = 0.0
        knows_parts = not self.pauses
        for gap, start, before_step, steps, end in self.batches:
            wait += between(gap, start)
            whole += between(start, end)
            if before_step is not None:
                optimizer += between(before_step, end)
            knows_parts = knows_parts and steps <= 1  # with several in one batch there is no telling their parts apart
        knows_parts = knows_parts and self.batches[-1][3] == 1  # a skipped step is not announced
        paused = sum([between(begin, end) for begin, end in self.pauses])
        return TimedStep(
            time_ms=wait + whole - paused,
            data_wait_ms=wait,
            forward_backward_ms=whole - optimizer if knows_parts else None,
            optimizer_ms=optimizer if knows_parts else None,
            optimizer_steps=self.optimizer_steps,
            batches=len(self.batches),
            tokens=self.tokens,
            positions=self.positions,
            padded_tokens=self.positions if self.is_padding_known else None,
            samples=self.samples,
            is_regular=self.is_regular,
        )


def _checked(count: Any, source: str | float) -> int | Tensor | None:
    """What a counter of the user's returned, as an int, a tensor of one integer, or None."""
    is_tensor = isinstance(count, Tensor) and count.numel() == 1 and not (count.is_floating_point() or count.is_complex())
    if count is None or (is_tensor and count.dtype != torch.bool):
        return count
    if not isinstance(count, (bool, Tensor)):
        try:
            number = operator.index(count)
        except TypeError:
            number = -1
        if number >= 0:
            return number
    raise ValueError(
        f"{source} returned {count!r} for a batch. It must be a whole number, 0 or more, a tensor of one integer, or None if it"
        " is not known."
    )


def _given_flops(per_token: float | None, per_step: float | None) -> StepFlops | None:
    if per_token is not None:
        return StepFlops(per_token, "token")
    return None if per_step is None else StepFlops(per_step, "step")


def _has_bilinear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Bilinear) for child in module.modules())


def _read(counts: list[Tensor]) -> list[int]:
    """The values of tensors of one element, in one copy to the host."""
    if not counts:
        return []
    device, dtype = counts[-1].device, torch.int64
    alike = [
        c if c.dtype is dtype and c.device == device and not c.ndim else c.detach().to(device, dtype).sum() for c in counts
    ]
    return torch.stack(alike).tolist()


def _count_in(strategy: Any, count: FlopCount) -> None:
    """Have the FLOPs counted of what runs inside the strategy's training step and backward, and of nothing else."""
    _stop_counting_in(strategy)  # of a batch that did not come to its end
    for name in ("training_step", "backward"):
        setattr(strategy, name, _counted(getattr(strategy, name), count))


def _counted(method: Callable[..., Any], count: FlopCount) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with count.counting(method.__name__):
            return method(*args, **kwargs)

    return counted


def _stop_counting_in(strategy: Any) -> None:
    for name in ("training_step", "backward"):
        strategy.__dict__.pop(name, None)
