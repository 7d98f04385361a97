"""Sample where gradients and weight updates lie, against what the formats can hold.

Two losses of 16-bit training cannot be seen in a loss curve until it is too late. *Gradients* smaller than fp16's smallest
normal number, 2^-14 after loss scaling, lose bits, and below 2^-25 they are zero. *Updates* smaller than half the spacing of a
parameter's format at its value vanish when they are added to it: 1.0 + 0.001 is 1.0 in bf16. Loss scaling cures the first, fp32
masters the second, and the numbers here say how much there was to cure.

Gradients are read in ``on_before_optimizer_step``, where they are true (unscaled) and not clipped yet. Masters are read there
and again at the end of the batch; the difference is the update, and what the parameter's own format would have made of it is
decided as rounding would.

**Gradients that fp16 has flushed to zero** are not there to be seen when the gradient arrives, and true zeros (dead units,
embedding rows that were not looked up) look like them. Rounding keeps the sign, though: flushed values arrive as negative
zeros half of the time, sums of nothing never. :func:`lightning_mp.numerics.formats.flushed_count` estimates them from that and
says where the estimate falls short: it is a lower bound for biases, for embeddings, and under accumulation.

**Cost.** Steps that are not sampled cost nothing: no tensor operation, no copy. A sampled step reads the whole gradient twice,
for its norm and its largest magnitude; all else looks at no more than ``max_elements`` elements of each parameter, evenly
spread, weighted by how many they stand for. The time of a sample of small parameters is that of starting operations, so these
elements are brought together, those of many parameters in one tensor, and looked at at once. Until the end of the batch it
holds 8 bytes for each of them, and for a moment fp32 copies of a group of parameters: 16 MiB, or those of one larger parameter.
It makes one device-to-host sync, and a second to read the scale of a stock ``GradScaler``; coalescing a sparse gradient is
another on CUDA.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_mp.callbacks.loss_scale import grad_scaler
from lightning_mp.callbacks.publish import Monitor, publish, publish_histogram
from lightning_mp.numerics.formats import (
    BF16,
    FP16,
    FP32,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    FloatFormat,
    exponent_histograms,
    flushed_estimate,
    format_of,
    lost,
    nears_overflow,
    nonzero,
    underflows,
)

PREFIX = "gradients"
#: W&B draws 32 bins, so more values than this add nothing.
HISTOGRAM_VALUES = 4096
#: How many sampled elements are looked at at once: enough that starting operations costs little, and few enough for a cache.
GROUP_ELEMENTS = 2**18


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """How the magnitudes of the gradient elements of one step are spread over the powers of two.

    To draw it: ``plt.stairs(histogram.counts, histogram.edges)``.

    Attributes:
        step: ``trainer.global_step`` after the step.
        counts: fp64 array of shape ``(277,)``; ``counts[i]`` elements, estimated from the sample, have a magnitude from
            ``2^edges[i]`` up to ``2^edges[i+1]``. Unscaled; zeros, infinities and NaNs are in none.
        edges: fp64 array of shape ``(278,)``, log2 of magnitudes: -149 to 128.
        flushed: elements that fp16 has flushed to zero, estimated; they belong to the left of the histogram.
        scale: the loss scale of the step. Scaled gradients lie ``log2(scale)`` further right.
    """

    step: int
    counts: np.ndarray[Any, np.dtype[np.float64]]
    edges: np.ndarray[Any, np.dtype[np.float64]]
    flushed: float
    scale: float

    def values(self, limit: int = HISTOGRAM_VALUES) -> np.ndarray[Any, np.dtype[np.float64]]:
        """About ``limit`` values of log2 that are spread as the counts are, evenly within each bin; rare bins have one.

        For loggers that make a histogram from values. Empty if there are no counts.
        """
        total = self.counts.sum()
        repeats = (np.ceil(self.counts * (limit / total)) if total else np.zeros_like(self.counts)).astype(np.int64)
        first = np.repeat(np.cumsum(repeats) - repeats, repeats)
        within = (np.arange(len(first)) - first + 0.5) / np.repeat(repeats, repeats)
        return np.repeat(self.edges[:-1], repeats) + within


class GradientRangeMonitor(Monitor):
    """Samples the range of gradients and the updates that 16-bit weights would have lost.

    ==============================================  =====================================================================
    key                                             meaning
    ==============================================  =====================================================================
    ``gradients/norm``                              2-norm of the whole gradient, in fp32, before clipping
    ``gradients/underflow_fraction``                elements that are zero or subnormal in fp16 at the present loss scale;
                                                    under bf16 and fp32, that would be in fp16 at scale 1
    ``gradients/underflow_fraction_fp16_unscaled``  the same in fp16 without a loss scale
    ``gradients/underflow_fraction_bf16``           the same in bf16
    ``gradients/near_overflow_fraction``            elements that, scaled, are within ``near_overflow_bits`` of 65504
    ``gradients/updates_lost_fraction``             updates that the parameter's own format would have lost
    ``gradients/stalled_parameters``                parameters that stand still: see ``stalled``
    ==============================================  =====================================================================

    Fractions are of the elements that are not true zeros: nonzero ones, and zeros that are estimated to have been flushed by
    fp16. (For updates: of the nonzero ones.) A value that is unknown is not logged. That is so for the fractions of a gradient
    that is all zeros, for the first and fifth row of the fractions if the compute format is not fp16, bf16 or fp32, and for
    updates of 16-bit parameters without masters, as there what was lost is not there to be seen.

    ``updates_lost_fraction`` is measured on masters: an update is lost if rounding (to nearest, ties to even) ``parameter +
    update`` to the parameter's format would give the parameter again. The format is that of the parameter's dtype: bf16 or
    fp16 under a ``*-master`` precision. A parameter that is fp32 is its own master, has fp32's format, and loses nothing that
    could be seen.

    Every sample is in ``trainer.callback_metrics`` and in all loggers, whatever ``log_every_n_steps`` is. Weights & Biases also
    gets ``gradients/exponents``, a histogram of log2 of the magnitudes.

    A step is the end of a batch in which an optimizer stepped. Several optimizers that step in one batch (manual optimization)
    make one sample: each parameter counts once, with the gradient of the first step that it took part in, and with its update
    over the rest of the batch. A skipped step is no sample; the next one that is applied takes its place. Under DDP every rank
    computes the same values, without collectives. With sharded parameters (FSDP, DeepSpeed) it says so once and does nothing.

    Args:
        every_n_steps: sample the first step of a fit, and every n-th from there.
        max_elements: the most elements of each parameter that are looked at, for all but ``norm``.
        near_overflow_bits: how many powers of two below 65504 is near.
        stall_fraction: a parameter is stalled if this fraction of its nonzero updates would be lost.

    Attributes:
        exponents: the :class:`ExponentHistogram` of the last sample, or None.
        stalled: names of the parameters that were stalled at the last sample: at least ``stall_fraction`` of their nonzero
            updates would be lost in the parameter's own format, or their whole gradient is zero. A change is logged.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from lightning_mp import GradientRangeMonitor, Trainer
        >>> trainer = Trainer(
        ...     precision_plugin="bf16-master", callbacks=[GradientRangeMonitor(every_n_steps=50)], accelerator="cpu",
        ...     logger=False, enable_checkpointing=False,
        ... )
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        max_elements: int = 2**14,
        near_overflow_bits: float = 1.0,
        stall_fraction: float = 0.99,
    ) -> None:
        for name, count in (("every_n_steps", every_n_steps), ("max_elements", max_elements)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}={count!r} must be a whole number, 1 or more.")
        if not _is_number(near_overflow_bits) or not 0 <= near_overflow_bits < math.inf:
            raise ValueError(f"near_overflow_bits={near_overflow_bits!r} must be a number of bits, 0 or more.")
        if not _is_number(stall_fraction) or not 0 < stall_fraction <= 1:
            raise ValueError(f"stall_fraction={stall_fraction!r} must be a fraction above 0, at most 1.")
        self.every_n_steps = every_n_steps
        self.max_elements = max_elements
        self.near_overflow_bits = near_overflow_bits
        self.stall_fraction = stall_fraction
        self._reset()

    def _reset(self) -> None:
        self.exponents: ExponentHistogram | None = None
        self.stalled: tuple[str, ...] = ()
        self._is_off = False
        self._has_stepped = False  # in this batch
        self._steps = 0
        self._pending: list[_StepSample] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh; refuse strategies that shard parameters."""
        super().on_train_start(trainer, pl_module)
        self._reset()
        self._is_off = isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy))
        if self._is_off:
            rank_zero_info(
                f"GradientRangeMonitor does nothing under {type(trainer.strategy).__name__}, which shards parameters and"
                " gradients over ranks. It works on one device and with DDP."
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """If the step is to be sampled, measure its gradients and keep the sampled elements of the masters."""
        if self._is_off:
            return
        self._has_stepped = True
        if self._steps % self.every_n_steps:
            return
        if self._pending and self._pending[-1].optimizer == _identity(optimizer):
            return  # again in this batch, or the model is evaluated again inside the step (LBFGS): the first one counts
        plugin = trainer.precision_plugin
        self._drop_skipped(plugin)
        seen = {id(param) for step in self._pending for param in step.params.values()}
        held = {id(param) for group in optimizer.param_groups for param in group["params"]} - seen
        named = pl_module.named_parameters()  # tied ones come once
        params = {name: param for name, param in named if id(param) in held and param.grad is not None and param.numel()}
        step = self._open(plugin, optimizer, params)
        with torch.no_grad():
            step.groups = [self._measure(plugin, step, group) for group in _grouped(params, self.max_elements)]
        self._pending.append(step)

    def batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Measure the updates and publish the sample. One device-to-host sync if a sample was taken, else nothing."""
        if not self._has_stepped:
            return  # still accumulating, or the step was skipped
        self._has_stepped = False
        if self._steps % self.every_n_steps:
            self._steps += 1
            return
        plugin = trainer.precision_plugin
        self._drop_skipped(plugin)
        steps, self._pending = self._pending, []
        with torch.no_grad():
            for group in (group for step in steps for group in step.groups):
                self._measure_updates(plugin, group)
            _read(steps)
        if grad_scaler(plugin) is not None:
            # it calls the hook for steps that it skips, too
            steps = [step for step in steps if all(math.isfinite(row.measured["largest"]) for row in step.rows)]
        if not any(step.rows for step in steps):
            return  # nothing was applied: the next step is sampled in its place
        self._steps += 1
        self._publish(trainer, steps)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of all tensors."""
        self._pending = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of all tensors."""
        super().on_exception(trainer, pl_module, exception)
        self._pending = []

    def recipe(self) -> dict[str, str | float]:
        """The arguments."""
        return {
            "every_n_steps": self.every_n_steps,
            "max_elements": self.max_elements,
            "near_overflow_bits": self.near_overflow_bits,
            "stall_fraction": self.stall_fraction,
        }

    def _open(self, plugin: Any, optimizer: Optimizer, params: dict[str, Parameter]) -> _StepSample:
        scaler = grad_scaler(plugin)
        return _StepSample(
            optimizer=_identity(optimizer),
            applied_before=getattr(plugin, "applied_steps", None),
            scale=float(scaler.get_scale()) if scaler is not None else float(getattr(plugin, "gradient_scale", 1.0)),
            compute=compute_format(str(plugin.precision)),
            params=params,
        )

    def _drop_skipped(self, plugin: Any) -> None:
        """Drop the last pending sample if its step, which is over, was skipped after all (by clipping, say)."""
        before = self._pending[-1].applied_before if self._pending else None
        if before is not None and plugin.applied_steps == before:
            self._pending.pop()

    def _measure(self, plugin: Any, step: _StepSample, params: dict[str, Parameter]) -> _Group:
        gradients = [_real_values(param.grad) for param in params.values()]  # type: ignore[arg-type]  # the caller has looked
        samples = [_sample(gradient, self.max_elements) for gradient in gradients]
        sizes = [sample.numel() for sample in samples]
        sample = torch.cat(samples).float()
        group = _Group(
            params,
            weights=[gradient.numel() / size for gradient, size in zip(gradients, sizes, strict=True)],
            sizes=_sizes(gradients),
            counts=_gradient_counts(sample, sizes, step, self.near_overflow_bits),
            histograms=exponent_histograms(sample, sizes),
            updates=torch.zeros(len(params), 2, device=sample.device),
        )
        masters = _masters(plugin, params, self.max_elements)
        if masters is not None:
            values = [_sample(param.detach(), self.max_elements) for param in params.values()]
            group.before = torch.cat(masters), torch.cat(values)
        return group

    def _measure_updates(self, plugin: Any, group: _Group) -> None:
        """Count the nonzero updates of the sampled elements, and those that the parameters' format would lose."""
        if group.before is None:
            return
        (masters_before, values), group.before = group.before, None
        masters, fmt = _masters(plugin, group.params, self.max_elements), format_of(values.dtype)
        if masters is None or fmt is None:
            return
        update = torch.cat(masters) - masters_before
        size = update.abs()
        changed = (size > 0) & (size < math.inf)
        group.updates = _counts([changed, lost(values, update, fmt)], [master.numel() for master in masters])

    def _publish(self, trainer: Trainer, steps: Sequence[_StepSample]) -> None:
        rows = [row for step in steps for row in step.rows]
        values = _values(rows, is_known=steps[-1].compute is not None)
        stalled = tuple(row.name for row in rows if row.is_stalled(self.stall_fraction))
        values["stalled_parameters"] = len(stalled)
        publish(trainer, {f"{PREFIX}/{key}": value for key, value in values.items()})
        self.exponents = ExponentHistogram(
            step=trainer.global_step,
            counts=np.sum([row.histogram * row.weight for row in rows], axis=0),
            edges=np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 2, dtype=np.float64),
            flushed=_total(rows, "flushed"),
            scale=steps[-1].scale,
        )
        if self.exponents.counts.any() and any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            publish_histogram(trainer, f"{PREFIX}/exponents", self.exponents.values())
        if stalled != self.stalled:
            self.stalled = stalled
            rank_zero_info(_stall_message(stalled, trainer.global_step, self.stall_fraction))


# --- one sample ----------------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """What was measured of ``n`` parameters of one device and dtype, still on their device."""

    params: dict[str, Parameter]
    weights: list[float]  # elements that one of the sample stands for
    sizes: Tensor  # (n, 2)
    counts: Tensor  # (n, 6)
    histograms: Tensor  # (n, 277)
    updates: Tensor  # (n, 2)
    before: tuple[Tensor, Tensor] | None = None  # sampled elements of masters and of parameters before the step


#: What is measured of a parameter, in the order of its tensors.
_SIZES = ("norm", "largest")
_COUNTS = ("counted", "flushed", "small", "small_unscaled", "small_in_bf16", "near_overflow")
_UPDATES = ("updates", "updates_lost")
_MEASURED = (*_SIZES, *_COUNTS, *_UPDATES)


@dataclass
class _Row:
    """What was measured of one parameter, on the host. Counts are of the sample."""

    name: str
    weight: float
    measured: dict[str, float]
    histogram: np.ndarray[Any, np.dtype[np.float64]]

    def is_stalled(self, stall_fraction: float) -> bool:
        updates, updates_lost = self.measured["updates"], self.measured["updates_lost"]
        return self.measured["largest"] == 0 or (updates > 0 and updates_lost >= stall_fraction * updates)


@dataclass
class _StepSample:
    """One optimizer's step of a batch that is sampled."""

    optimizer: int
    applied_before: int | None  # the plugin's count of applied steps; None if it has none
    scale: float
    compute: FloatFormat | None
    params: dict[str, Parameter]
    groups: list[_Group] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)  # once they are read


def _grouped(params: dict[str, Parameter], max_elements: int) -> Iterable[dict[str, Parameter]]:
    """Parameters of one device and dtype together, few enough that their samples and fp32 copies are small."""
    groups: defaultdict[Any, dict[str, Parameter]] = defaultdict(dict)
    filled: Counter[Any] = Counter()
    for name, param in params.items():
        kind = param.device, param.dtype
        groups[kind, filled[kind] // GROUP_ELEMENTS][name] = param
        # masters are copied whole, so a group has at most 16 times as many elements as it samples
        filled[kind] += max(min(param.numel(), max_elements), param.numel() // 16)
    return groups.values()


def _sizes(gradients: list[Tensor]) -> Tensor:
    """2-norm and largest magnitude of all elements (``_SIZES``), as an fp32 tensor of shape ``(n, 2)``."""
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    # on a CPU a fraction of the time of the infinity norm
    smallest, largest = zip(*(torch.aminmax(gradient) for gradient in gradients), strict=True)
    return torch.stack([torch.stack(norms), torch.maximum(-torch.stack(smallest), torch.stack(largest))], dim=1)


def _gradient_counts(sample: Tensor, sizes: Sequence[int], step: _StepSample, near_overflow_bits: float) -> Tensor:
    """Counts of the samples' elements, in the order of ``_COUNTS``, as a tensor of shape ``(n, 6)``."""
    small_unscaled = underflows(sample, FP16)
    masks = [
        nonzero(sample),
        underflows(sample, FP16, step.scale) if step.scale != 1 else small_unscaled,
        small_unscaled,
        underflows(sample, BF16),
        nears_overflow(sample, FP16, step.scale, near_overflow_bits),
    ]
    if step.compute == FP16:  # bf16 and fp32 have range enough that their zeros are true
        zeros = sample == 0
        masks += [zeros, zeros & sample.signbit()]
    counted, small, small_unscaled, small_in_bf16, near_overflow, *of_zeros = _counts(masks, sizes).unbind(1)
    flushed = flushed_estimate(*of_zeros) if of_zeros else torch.zeros_like(counted)
    # what the scale could not save would have been lost without it
    with_flushed = [counted + flushed, flushed, small + flushed, small_unscaled + flushed]
    return torch.stack([*with_flushed, small_in_bf16, near_overflow], dim=1)


def _counts(masks: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """How often each mask is true in each parameter's part of it, as an int32 tensor of shape ``(n, len(masks))``."""
    return torch.stack([part.sum(1, dtype=torch.int32) for part in torch.stack(tuple(masks)).split(sizes, dim=1)])


def _read(steps: Sequence[_StepSample]) -> None:
    """Bring everything to the host, into ``rows``. One device-to-host sync."""
    groups = [group for step in steps for group in step.groups]
    if not groups:
        return
    device = groups[0].counts.device
    parts = [
        torch.cat([group.sizes, group.counts, group.updates, group.histograms], dim=1).to(device, torch.float32)
        for group in groups
    ]
    table = iter(torch.cat(parts).cpu().numpy().astype(np.float64))
    for step in steps:
        rows = {}
        for group in step.groups:
            for name, weight in zip(group.params, group.weights, strict=True):
                numbers = next(table)
                measured = dict(zip(_MEASURED, numbers.tolist(), strict=False))  # the histogram follows
                rows[name] = _Row(name, weight, measured, numbers[len(_MEASURED) :])
        step.rows = [rows[name] for name in step.params]  # in the module's order


def _values(rows: Sequence[_Row], is_known: bool) -> dict[str, float]:
    """The values to publish; those that are unknown are left out."""
    values = {"norm": math.hypot(*(row.measured["norm"] for row in rows))}
    counted, updates = _total(rows, "counted"), _total(rows, "updates")
    if counted:
        if is_known:
            values["underflow_fraction"] = _total(rows, "small") / counted
            values["near_overflow_fraction"] = _total(rows, "near_overflow") / counted
        values["underflow_fraction_fp16_unscaled"] = _total(rows, "small_unscaled") / counted
        values["underflow_fraction_bf16"] = _total(rows, "small_in_bf16") / counted
    if updates:
        values["updates_lost_fraction"] = _total(rows, "updates_lost") / updates
    return values


def _total(rows: Sequence[_Row], name: str) -> float:
    return math.fsum(row.measured[name] * row.weight for row in rows)


def _stall_message(stalled: Sequence[str], step: int, stall_fraction: float) -> str:
    if not stalled:
        return f"Step {step}: no parameter is stalled any more."
    more = f" and {len(stalled) - 5} more" if len(stalled) > 5 else ""
    are = "parameter is" if len(stalled) == 1 else "parameters are"
    return (
        f"Step {step}: {len(stalled)} {are} stalled: {', '.join(stalled[:5])}{more}. Their whole gradient is zero, or"
        f" at least {stall_fraction:.0%} of their updates are too small for the parameter's own format; only fp32 masters keep"
        " those."
    )


# --- what is read of plugin and parameter --------------------------------------------------------------------------------


def compute_format(precision: str) -> FloatFormat | None:
    """The format of matrix products under a precision by name, Lightning's or ours; None if it is not one of three."""
    for prefix, fmt in (("16", FP16), ("bf16", BF16), ("32", FP32)):
        if precision.startswith(prefix):
            return fmt
    return None


def _masters(plugin: Any, params: dict[str, Parameter], max_elements: int) -> list[Tensor] | None:
    """Sampled elements of the fp32 masters of parameters of one dtype: copies, or those of the parameters if they are fp32.

    NaNs stand for a parameter that has no fp32 value; None if it is known that none of them has one.
    """
    dtype = next(iter(params.values())).dtype
    masters: dict[str, Tensor]
    if dtype == torch.float32:
        masters = {name: param.detach() for name, param in params.items()}
    elif format_of(dtype) is None or getattr(plugin, "masters", None) is None:
        return None
    else:
        masters = plugin.masters(names=list(params))
    samples = [_sample(masters[name], max_elements, like=param) for name, param in params.items()]
    return [x if x.dtype == torch.float32 else torch.full_like(x, math.nan, dtype=torch.float32) for x in samples]


def _real_values(gradient: Tensor) -> Tensor:
    """The gradient as a dense real tensor that is not empty: of a sparse one the values, of a complex one both parts."""
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if not gradient.numel():
        return torch.zeros(1, device=gradient.device)
    return gradient.float() if gradient.dtype == torch.float64 else gradient


def _sample(tensor: Tensor, max_elements: int, like: Tensor | None = None) -> Tensor:
    """At most ``max_elements`` elements, evenly spread, as a 1-D view if the tensor's memory has no gaps.

    The same elements, in the same order, as are taken of ``like``.
    """
    size = tensor.numel()
    stride = max(1, -(-size // max_elements))
    # a stride that shares a factor with the length of a row would see the same columns in each
    while math.gcd(stride, size) != 1 and stride < size:
        stride += 1
    ordered = tensor if like is None else like
    if not ordered.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=ordered.stride, reverse=True))  # in the order of memory
    flat = tensor.reshape(-1)
    return flat if stride == 1 else flat[::stride]


def _identity(optimizer: Any) -> int:
    """The same for Lightning's wrapper and for what it wraps."""
    return id(getattr(optimizer, "optimizer", optimizer))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
