"""Log where the memory goes: the measured peak, and the parts of it that the choice of precision decides.

The parts are counted from the tensors, not computed from a formula, so the numbers are those of *this* module, optimizer and
plugin: frozen and tied weights, layers that stay fp32 and optimizers without moments show. What the peak has beyond them is
activations and temporaries, which the precision changes too, and the size of a batch more than anything else.

**Which gradients.** Under ``16-master`` autograd makes fp16 gradients, 2 bytes per parameter, and they are unscaled into fp32,
4 bytes, when backward is over. Sums over micro-batches, and averages over ranks, are fp32 likewise under ``bf16-master``. The
number of record, ``memory/gradients_gib``, is what gradients take in backward, as autograd left them in each parameter (see
:class:`~lightning_mp.cost.memory.GradientWatch`). ``memory/gradients_at_step_gib`` is what they take in
``on_before_optimizer_step``, and go on to take until they are cleared. Lightning does that after the next forward; our plugin,
under a ``*-master`` precision, before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.callbacks.nesting import leaves
from lightning_mp.callbacks.publish import Monitor, alert, is_logging_step, publish
from lightning_mp.cost.activations import saved_bytes
from lightning_mp.cost.allocator import PeakReader, device_bytes
from lightning_mp.cost.memory import (
    GradientWatch,
    PersistentBytes,
    StorageKey,
    peak_rss_bytes,
    persistent_bytes,
    step_counter_bytes,
    storage_keys,
    tensors_in,
    unseen_bytes,
)

log = logging.getLogger(__name__)

PREFIX = "memory"
GIB = 2**30
#: Those that are the largest over the ranks; the others are those of the rank with the highest peak.
LARGEST = ("peak", "peak_reserved", "run_peak", "peak_rss", "alloc_retries")
PARTS = ("weights", "masters", "gradients", "optimizer", "buffers", "activations")
#: What is measured, in bytes except for ``alloc_retries``, ``parameters`` and ``step_counters``, in the order in which ranks
#: exchange it.
MEASURED = (*LARGEST, *PARTS, "gradients_at_step", "parameters", "step_counters")

Bytes = dict[str, int]


@dataclass
class _Step:
    """The optimizer step that is going to be logged, in progress."""

    gradients: GradientWatch
    known: set[StorageKey] | None = None  # storages that are no activations; None where they are not counted
    saved: int | None = None  # bytes saved for backward, the most at a time
    gradients_at_step: int | None = None


class MemoryMonitor(Monitor):
    """Logs peak memory and its parts, in GiB (2^30 bytes).

    ================================  ===================================================================================
    key                               meaning
    ================================  ===================================================================================
    ``memory/peak_gib``               accelerators: the most that was in tensors at a time, since the row before
    ``memory/peak_reserved_gib``      accelerators: the most that torch's allocator held, since the row before
    ``memory/run_peak_gib``           accelerators: the most in tensors at a time, since the fit began; it survives a resume
    ``memory/peak_rss_gib``           CPU: the largest resident memory of the process so far, interpreter and libraries
                                      included
    ``memory/alloc_retries``          accelerators: allocations of this fit for which the allocator had to flush its cache
    ``memory/weights_gib``            parameters
    ``memory/masters_gib``            what the precision plugin keeps beside them
    ``memory/gradients_gib``          gradients in backward, as autograd makes them; the most in any backward of the step
    ``memory/gradients_at_step_gib``  gradients when the optimizer steps: unscaled, summed and averaged
    ``memory/optimizer_gib``          optimizer state, step counters included
    ``memory/buffers_gib``            buffers
    ``memory/activations_gib``        accelerators: the peak less weights, masters, gradients, optimizer state and buffers;
                                      on a CPU, what forward saved for backward
    ``memory/bytes_per_parameter``    (weights + masters + gradients + optimizer state without step counters) / parameters
    ``memory/peak_rank``              several ranks: the one with the highest peak, whose parts are shown
    ================================  ===================================================================================

    Parts are exact to the byte. Each storage counts once, so tied weights and views do; of sharded parameters the local shard
    counts. They are counted after the step; masters and optimizer state count wherever they are, but only what is on the
    accelerator is taken off its peak. ``bytes_per_parameter`` is not rounded. Step counters, single numbers for each parameter
    tensor, are left out of it, so that with AdamW it is 16 under ``32-true`` and ``*-mixed``, 14 under ``bf16-master``, 16 with
    ``master="copy"`` and under ``16-master``, and 8 under Lightning's ``bf16-true``; more where normalisation layers stay fp32
    or micro-batches are accumulated, and less where parameters are frozen.

    ``activations_gib`` on an accelerator is a difference, so it holds whatever else was alive at the peak: temporaries, the
    batch, DDP's communication buckets, the scratch memory of the optimizer step, and fp32 gradients beyond ``gradients_gib``.
    On a CPU it is counted from the autograd graph when backward begins (:func:`~lightning_mp.cost.activations.saved_bytes`),
    the most of any backward of the step.

    A value that is not known is not logged: optimizer state before the optimizer's first step, gradients of a step without any,
    the activations of those steps. A skipped step (fp16) has a row, without ``gradients_at_step_gib``.

    Rows are made at the end of the steps that ``log_every_n_steps`` selects, and nothing is counted in between. They cost no
    device-to-host sync with one process. With several, all ranks exchange their numbers in one collective, and each row costs
    one sync; which steps are logged follows from Lightning's count of batches, which is the same on all ranks, also where a
    rank's ``training_step`` returns None.

    Args:
        reset_peak: reset the device's peak counter after each row, so that each row has its own peak. The counter belongs to
            the process: other code that reads it (``torch.cuda.max_memory_allocated``) then sees the peak since the last row.
            Several monitors do not disturb each other. With ``False`` the counter is left alone, ``peak_gib`` is logged only in
            rows in which it rose, as it is not known otherwise, and activations are those of the run's peak.
        warn_fraction: warn once when the peak exceeds this fraction of the device's memory, with the parts and what would help.
            Accelerators only: what a process may use of a host's memory is not known.

    Raises:
        ValueError: an argument is out of range.

    When the device runs out of memory, the parts as they were last known are written to the log of the rank that it happened
    on, before the error goes on.

    Its state in a checkpoint: ``run_peak_bytes``, ``precision`` and ``device``; a resumed run takes the peak over if the other
    two are the same.

    Example:
        >>> from lightning_mp import MemoryMonitor, Trainer
        >>> trainer = Trainer(
        ...     precision_plugin="bf16-master", callbacks=[MemoryMonitor()], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False,
        ... )
    """

    def __init__(self, *, reset_peak: bool = True, warn_fraction: float = 0.95) -> None:
        if not isinstance(reset_peak, bool):
            raise ValueError(f"reset_peak={reset_peak!r} must be True or False.")
        if isinstance(warn_fraction, bool) or not isinstance(warn_fraction, (int, float)) or not 0 < warn_fraction <= 1:
            raise ValueError(f"warn_fraction={warn_fraction!r} must be a fraction of the device's memory, above 0, at most 1.")
        self.reset_peak = reset_peak
        self.warn_fraction = warn_fraction
        self._resumed: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._device = torch.device("cpu")
        self._precision = ""
        self._peaks: PeakReader | None = None
        self._device_bytes: int | None = None
        self._earlier_peak: int | None = None  # of the run before it was resumed
        self._run_peak: int | None = None
        self._step: _Step | None = None
        self._stepped: set[int] = set()  # optimizers that are known to have stepped, by id
        self._step_hooks: list[RemovableHandle] = []
        self._last: Bytes = {}
        self._has_warned = False

    # --- a run -------------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the run's peak."""
        self._let_go()
        self._reset()
        resumed, self._resumed = self._resumed, {}
        self._device = trainer.strategy.root_device
        self._precision = str(trainer.precision_plugin.precision)
        if (resumed.get("precision"), resumed.get("device")) == (self._precision, self._device.type):
            self._earlier_peak = resumed.get("run_peak_bytes")
        if self._device.type != "cpu":
            self._peaks = PeakReader(self._device, resets=self.reset_peak)
            self._device_bytes = device_bytes(self._device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the first window, and wait for the optimizers' first steps."""
        super().on_train_start(trainer, pl_module)
        if self._peaks is not None:
            self._peaks.close_window()  # sanity checking is part of the run, not of the first row
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # a wrapper may not have run Optimizer.__init__
                self._step_hooks.append(optimizer.register_step_post_hook(self._note_step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """If the step is to be logged, watch its gradients."""
        if not is_logging_step(trainer):
            return
        if self._step is None:
            self._step = _Step(GradientWatch(pl_module))
        if self._device.type == "cpu":
            there = [*pl_module.parameters(), *pl_module.buffers(), *(leaf for _, leaf in leaves(batch))]
            self._step.known = storage_keys(there)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Look at the gradients that are there and, on a CPU, at what forward saved."""
        step = self._step
        if step is None:
            return
        step.gradients.before_backward()
        if step.known is not None:
            step.saved = _max(step.saved, saved_bytes(loss, step.known))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the gradients as the optimizer gets them."""
        if self._step is not None:
            gradients = (param.grad for param in pl_module.parameters() if param.grad is not None)
            self._step.gradients_at_step = _max(self._step.gradients_at_step, unseen_bytes(gradients, set()))

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Make a row if the step is to be logged and is complete."""
        if self._step_hooks and len(self._stepped) == len(trainer.optimizers):
            self._remove_step_hooks()
        # Lightning does not begin a batch that is None, but a rank that has one has to take part all the same
        is_due = self._step is not None or (batch is None and trainer.world_size > 1 and is_logging_step(trainer))
        if not is_due or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self._last = measured = self._measure(trainer, pl_module)
        rank = None
        if trainer.world_size > 1:
            measured, rank = _over_ranks(trainer, measured)
        values = _values(measured)
        if rank is not None:
            values[f"{PREFIX}/peak_rank"] = float(rank)
        publish(trainer, values)
        self._warn_if_near_limit(trainer, measured, rank)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the module."""
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """When memory ran out, write down where it went."""
        super().on_exception(trainer, pl_module, exception)
        self._let_go()
        if pl_module is not None and (isinstance(exception, torch.OutOfMemoryError) or is_oom_error(exception)):
            last = self._last or _parts(self._count(trainer, pl_module))
            when = "as last logged" if self._last else "at the error, before anything was logged"
            log.error(
                "Out of memory on rank %d (%s). Parts %s: %s. %s",
                trainer.global_rank,
                trainer.strategy.root_device,
                when,
                _describe(last, self._device_bytes),
                _remedy(last),
            )

    def recipe(self) -> dict[str, str | float]:
        """``reset_peak`` (0 or 1) and ``warn_fraction``."""
        return {"reset_peak": float(self.reset_peak), "warn_fraction": self.warn_fraction}

    def state_dict(self) -> dict[str, Any]:
        """The run's peak, if it is known: ``run_peak_bytes``, and the ``precision`` and ``device`` that it belongs to."""
        if self._run_peak is None:
            return {}
        return {"run_peak_bytes": self._run_peak, "precision": self._precision, "device": self._device.type}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the peak of the run so far, for the next fit."""
        self._resumed = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # a copy is the recipe, without the hooks and the counters of a run
        return {"reset_peak": self.reset_peak, "warn_fraction": self.warn_fraction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # --- measuring ---------------------------------------------------------------------------------------------------------

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped.add(id(optimizer))

    def _remove_step_hooks(self) -> None:
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks = []

    def _let_go(self) -> None:
        self._remove_step_hooks()
        if self._step is not None:
            self._step.gradients.remove()
            self._step = None

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> Bytes:
        """What this process knows, by the names of :data:`MEASURED`; what is not known is left out."""
        step, self._step = self._step, None
        if step is not None:
            step.gradients.remove()
        found: dict[str, int | None] = {**self._read_peaks()}
        found.update(_parts(self._count(trainer, pl_module)))
        if not self._knows_optimizer_state(trainer):
            found["optimizer"] = None
        # those that are there now are those of the step, not those of its backward
        found["gradients"] = step.gradients.bytes() if step is not None else None
        found["gradients_at_step"] = step.gradients_at_step if step is not None else None
        found["step_counters"] = step_counter_bytes(trainer.optimizers)
        if self._peaks is None:
            found["activations"] = step.saved if step is not None else None
        else:
            found["activations"] = self._beyond_parts(trainer, pl_module, step, found)
        return {name: value for name, value in found.items() if value is not None}

    def _read_peaks(self) -> dict[str, int | None]:
        if self._peaks is None:
            return {"peak_rss": peak_rss_bytes()} if self._device.type == "cpu" else {}
        peaks = self._peaks.close_window()
        self._run_peak = _max(peaks.run_allocated, self._earlier_peak if peaks.run_allocated is not None else None)
        return {
            "peak": peaks.allocated,
            "peak_reserved": peaks.reserved,
            "run_peak": self._run_peak,
            "alloc_retries": peaks.alloc_retries,
        }

    def _count(self, trainer: Trainer, pl_module: LightningModule, device: torch.device | None = None) -> PersistentBytes:
        masters = getattr(trainer.precision_plugin, "master_tensors", tuple)  # stock plugins hold none
        return persistent_bytes(pl_module, trainer.optimizers, masters(), device)

    def _knows_optimizer_state(self, trainer: Trainer) -> bool:
        """Whether every optimizer has made the state that it is going to keep: it has some, or it has stepped without."""
        optimizers = trainer.optimizers
        return bool(optimizers) and all(id(o) in self._stepped or _has_state(o) for o in optimizers)

    def _beyond_parts(
        self, trainer: Trainer, pl_module: LightningModule, step: _Step | None, found: Mapping[str, int | None]
    ) -> int | None:
        """The peak less what is persistent on the device."""
        peak = found["peak"] if found["peak"] is not None or self.reset_peak else found["run_peak"]
        gradients = step.gradients.bytes(self._device) if step is not None else None
        if peak is None or gradients is None or found["optimizer"] is None:
            return None
        counted = replace(self._count(trainer, pl_module, self._device), gradients=gradients)
        beyond = peak - counted.total - counted.buffers
        return beyond if beyond >= 0 else None  # somebody else has reset the counter

    def _warn_if_near_limit(self, trainer: Trainer, measured: Bytes, rank: int | None) -> None:
        peak = measured.get("peak", measured.get("run_peak"))
        if self._has_warned or peak is None or self._device_bytes is None or peak <= self.warn_fraction * self._device_bytes:
            return
        self._has_warned = True
        where = "" if rank is None else f" on rank {rank}"
        text = (
            f"Peak memory{where} is {peak / self._device_bytes:.1%} of the device's {self._device_bytes / GIB:.2f} GiB:"
            f" {_describe(measured, None)}. {_remedy(measured)}"
        )
        rank_zero_warn(text)
        alert(trainer, "Memory is near the device's limit", text)


def _parts(counted: PersistentBytes) -> Bytes:
    return {
        "weights": counted.weights,
        "masters": counted.masters,
        "gradients": counted.gradients,
        "optimizer": counted.optimizer_state,
        "buffers": counted.buffers,
        "parameters": counted.parameters,
    }


def _has_state(optimizer: Optimizer) -> bool:
    return next(tensors_in(dict(optimizer.state)), None) is not None


def _max(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _over_ranks(trainer: Trainer, measured: Bytes) -> tuple[Bytes, int]:
    """The largest peaks, the parts of the rank that has the highest, and which it is. A collective, and one sync."""
    row = torch.tensor([measured.get(name, -1) for name in MEASURED], dtype=torch.int64, device=trainer.strategy.root_device)
    gathered: Any = trainer.strategy.all_gather(row)
    rows = [dict(zip(MEASURED, values, strict=True)) for values in gathered.view(-1, len(MEASURED)).tolist()]
    heights = [next((row[name] for name in ("peak", "run_peak", "peak_rss") if row[name] >= 0), -1) for row in rows]
    rank = heights.index(max(heights))
    merged = {**rows[rank], **{name: max(other[name] for other in rows) for name in LARGEST}}
    return {name: value for name, value in merged.items() if value >= 0}, rank


def _values(measured: Bytes) -> dict[str, float]:
    """Keys and values for the loggers. GiB are exact, as 2^30 is a power of two."""
    names: Iterable[str] = (*LARGEST[:-1], *PARTS, "gradients_at_step")
    values = {f"{PREFIX}/{name}_gib": measured[name] / GIB for name in names if name in measured}
    if "alloc_retries" in measured:
        values[f"{PREFIX}/alloc_retries"] = float(measured["alloc_retries"])
    needed = ("weights", "masters", "gradients", "optimizer")
    if measured.get("parameters") and all(name in measured for name in needed):
        kept = sum(measured[name] for name in needed) - measured["step_counters"]
        values[f"{PREFIX}/bytes_per_parameter"] = kept / measured["parameters"]
    return values


def _describe(measured: Bytes, device_bytes: int | None) -> str:
    """The parts and the peak in one line."""
    parts = [f"{name.replace('_', ' ')} {measured[name] / GIB:.2f} GiB" for name in (*PARTS, *LARGEST[:-1]) if name in measured]
    if measured.get("alloc_retries"):
        parts.append(f"{measured['alloc_retries']} allocation retries")
    if device_bytes is not None:
        parts.append(f"device memory {device_bytes / GIB:.2f} GiB")
    return ", ".join(parts)


def _remedy(measured: Bytes) -> str:
    """What would help against the largest part."""
    persistent = {name: measured.get(name, 0) for name in ("weights", "masters", "gradients", "optimizer")}
    if measured.get("activations", 0) >= sum(persistent.values()):
        return (
            "Most of it is activations and temporaries: use smaller micro-batches with accumulate_grad_batches, activation"
            " checkpointing, or a 16-bit precision."
        )
    if max(persistent, key=lambda name: persistent[name]) == "optimizer":
        return (
            "Most of what stays is optimizer state: use an optimizer with less of it (8-bit moments, SGD, Adafactor), or shard"
            " it over devices (FSDP); 'bf16-master' saves 2 of AdamW's 16 bytes per parameter."
        )
    return (
        "Most of what stays is weights and gradients: use precision 'bf16-master' if it is not in use yet, freeze parts of the"
        " module, or shard it over devices (FSDP)."
    )
