"""Loss scaling in a run: what happens around each backward, and before each optimizer step.

A **round** is what lies between two updates of the scale: one or several backwards, then the optimizer steps on their
gradients. The scale is constant within a round, and updated once, however many optimizers step: at the beginning of the first
backward that follows a step. An accumulation window is one round.

Before a backward the gradients that are there already are multiplied by the scale, so that autograd may add to them. After it
*all* gradients are divided by it, into fp32. So a gradient is never unscaled by another scale than the one that made it, and
user code (hooks, clipping, loggers, manual optimization) sees true gradients at all times, from ``on_after_backward`` on.

The same pass finds the largest magnitude. Before the first optimizer step of a round three numbers are read from the device at
once, the only device-to-host sync of a step:

======================  =====================================================================================================
largest magnitude       over the gradients of the round's first backward, and others that are made afresh later; sums over
                        micro-batches do not count, as fp16 has only to hold the terms
overflow                whether any gradient became infinite or NaN
non-finite loss         whether any loss was infinite or NaN before it was scaled: no matter of scaling
======================  =====================================================================================================

They are combined over the ranks (maximum) first, so that all ranks step, or none. On an overflow only, each gradient is looked
at, to find out which optimizers are concerned, and where it began.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from lightning_mp.gradients import LOW, scale_, unscale_
from lightning_mp.numerics.loss_scale import (
    FP16_MAX,
    AdaptiveLossScale,
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from lightning_mp.swap import nested_optimizers, requires_closure

#: The largest power of two that fp16 holds: what an fp16 loss can be multiplied by, as that is the gradient it gets.
MAX_SCALE_OF_FP16_LOSS = 2.0**15


@dataclass(frozen=True)
class Measured:
    """What a round's gradients were, as host numbers."""

    amax: float | None  # largest unscaled magnitude; None if it is not known
    overflow: bool
    loss_is_finite: bool


class _Mark:
    """Recognises a gradient, as long as nobody writes to it or replaces it, without keeping it alive."""

    __slots__ = ("_grad", "_version")

    def __init__(self, grad: Tensor) -> None:
        self._grad = TensorWeakRef(grad)
        self._version = grad._version

    def fits(self, grad: Tensor) -> bool:
        return self._grad() is grad and self._version == grad._version


@dataclass
class _Round:
    fresh: list[Tensor] = field(default_factory=list)  # largest scaled magnitudes, 0-dim
    sums: list[Tensor] = field(default_factory=list)  # the same, of gradients that were added to
    losses: list[Tensor] = field(default_factory=list)  # 0 for a finite loss, else NaN, 0-dim
    measured_grads: dict[int, _Mark] = field(default_factory=dict)  # by the parameter's id
    measured: Measured | None = None  # once a step asked
    has_stepped: bool = False


class LossScaling:
    """The scale of a run, the check of its gradients, and the count of its steps.

    Args:
        scale: the scaler to begin with.
        checks: whether gradients are checked, and steps with non-finite ones dropped.
        is_fp16: whether gradients are made in fp16.
        max_consecutive_skips: stop after so many dropped steps of an optimizer in a row.

    Attributes:
        gradient_scale: the scale with which the present gradients were made.
        applied_steps: optimizer steps that changed weights.
        skipped_steps: optimizer steps that were dropped.
        nonfinite_losses: those of the skipped steps that were dropped because a loss was not finite.
        last_step_skipped: whether the last optimizer step was dropped.
        last_overflow: the parameter where the last overflow began, or None.
        headroom_bits: log2(65504 / largest scaled gradient) when gradients were last measured; None if it is not known, or
            the arithmetic is not fp16.
    """

    def __init__(self, scale: LossScale, checks: bool, is_fp16: bool, max_consecutive_skips: int = 50) -> None:
        self.checks = checks
        self.is_fp16 = is_fp16
        self.gradient_scale = 1.0
        self.applied_steps = self.skipped_steps = self.nonfinite_losses = 0
        self.last_step_skipped = False
        self.last_overflow: str | None = None
        self.headroom_bits: float | None = None
        self._scale = scale
        self._max_consecutive_skips = max_consecutive_skips
        self._consecutive_skips: dict[int, int] = {}  # by the optimizer's position
        self._overflowed_at_floor: set[int] = set()  # positions, since the last applied step
        self._history: deque[float] = deque(maxlen=12)
        self._fp16_loss_reported = self._unscaled_reported = False
        self._round = _Round()
        self._module: Module | None = None
        self._optimizers: list[Optimizer] = []
        self._named: dict[int, tuple[str, Any]] = {}  # every parameter, by id
        self._may_edit_gradients = True
        self._had_gradient: set[int] = set()  # before the last backward
        self._overflowed: set[int] = set()  # known to have a non-finite gradient

    @property
    def is_active(self) -> bool:
        """Whether there is a scale."""
        return not isinstance(self._scale, NoLossScale)

    @property
    def was_used(self) -> bool:
        """Whether any step was counted."""
        return bool(self.applied_steps or self.skipped_steps)

    @property
    def scale(self) -> LossScale:
        """The scaler as the next round is going to use it, as far as it is known by now."""
        round_ = self._round
        if not round_.has_stepped or round_.measured is None or not round_.measured.loss_is_finite:
            return self._scale
        return self._scale.update(finite=not round_.measured.overflow, amax=round_.measured.amax)

    @scale.setter
    def scale(self, scale: LossScale) -> None:
        self._scale, self._round = scale, _Round()

    # --- a run -------------------------------------------------------------------------------------------------------------

    def connect(self, module: Module, optimizers: Sequence[Optimizer], may_edit_gradients: bool) -> None:
        """Name the module whose gradients are scaled, and the optimizers that step on them.

        Args:
            module: the module in training.
            optimizers: all of them.
            may_edit_gradients: whether gradients may be written to, or made, by others between backward and a step.

        Raises:
            MisconfigurationException: a gradient cannot be unscaled in fp32, or an optimizer's step cannot be dropped.
        """
        self._module, self._optimizers = module, list(optimizers)
        self._may_edit_gradients = may_edit_gradients
        self._find_parameters()
        if not self.checks:
            return
        every = chain.from_iterable(map(nested_optimizers, optimizers))
        if names := [type(optimizer).__qualname__ for optimizer in every if requires_closure(optimizer)]:
            raise MisconfigurationException(
                f"{names[0]} evaluates the model inside step(), where a step with infinite or NaN gradients cannot be dropped"
                " any more. Loss scaling, and skip_nonfinite, do not work with it: use 'bf16-master', 'bf16-mixed' or '32-true'"
                " without them, or another optimizer."
            )
        low = [name for name, param in self._named.values() if param.grad_dtype in LOW and param.requires_grad]
        if low and self.is_active:
            raise MisconfigurationException(
                f"Parameters {', '.join(low[:5])} are 16-bit and have no fp32 master, so their gradients cannot be unscaled in"
                " fp32. Make them fp32 (module.float()), or use '16-master'."
            )

    def release(self) -> None:
        """Let go of the module; scale and counts stay."""
        self.scale = self.scale
        self._module, self._optimizers, self._named, self._overflowed = None, [], {}, set()

    def _find_parameters(self) -> None:
        assert self._module is not None
        self._named = {id(param): (name, param) for name, param in self._module.named_parameters()}
        for optimizer in self._optimizers:
            for param in _parameters(optimizer):
                self._named.setdefault(id(param), (f"a parameter of {type(optimizer).__qualname__}", param))

    # --- backward ----------------------------------------------------------------------------------------------------------

    def before_backward(self, loss: Tensor) -> Tensor:
        """Begin a new round if there was a step, and scale the gradients that are there.

        Returns:
            The loss multiplied by the scale, in fp32 at least.
        """
        if not self.checks:
            return loss
        if self._round.has_stepped:
            self._scale, self._round = self.scale, _Round()
        self._round.measured = None
        if any(id(param) not in self._named for optimizer in self._optimizers for param in _parameters(optimizer)):
            self._find_parameters()
        self._limit_for(loss)
        self.gradient_scale = self._scale.scale
        self._round.losses.append((loss.detach() * 0).sum())
        with_gradient = [param for _, param in self._named.values() if param.grad is not None]
        self._had_gradient = set(map(id, with_gradient))
        if self._overflowed:  # a gradient of an earlier round that is still there is no news
            self._overflowed &= set(map(id, _nonfinite(with_gradient)))
        scale_(with_gradient, self.gradient_scale)
        if not self.is_active:
            return loss
        return (loss.float() if loss.dtype in LOW else loss) * self.gradient_scale

    def after_backward(self) -> None:
        """Unscale and measure every gradient. No device-to-host sync."""
        if not self.checks:
            return
        is_first = len(self._round.losses) == 1  # what is there from before it is zero, as a rule
        fresh, sums, known = [], [], []
        for key, (_, param) in self._named.items():
            if param.grad is None:
                continue
            if key in self._overflowed:
                known.append(param)
            elif is_first or key not in self._had_gradient:
                fresh.append(param)
            else:
                sums.append(param)
        found: list[Tensor] = []  # of those that are known, and are not to count again
        for params, amaxes in ((fresh, self._round.fresh), (sums, self._round.sums), (known, found)):
            amax = unscale_(params, self.gradient_scale, widen=self.is_fp16 or self.is_active)
            if amax is not None:
                amaxes.append(amax)
            if self._may_edit_gradients:
                self._round.measured_grads.update((id(param), _Mark(param.grad)) for param in params)

    def _limit_for(self, loss: Tensor) -> None:
        if loss.dtype != torch.float16 or self._scale.scale <= MAX_SCALE_OF_FP16_LOSS:
            return
        factor = MAX_SCALE_OF_FP16_LOSS / self._scale.scale
        self._scale = self._scale.with_scale(MAX_SCALE_OF_FP16_LOSS)
        self._round.fresh = [amax * factor for amax in self._round.fresh]  # of another loss in the same round
        if not self._fp16_loss_reported:
            self._fp16_loss_reported = True
            rank_zero_info(
                "The loss is an fp16 tensor. Its gradient is the loss scale, so the scale is kept at 2^15, the largest power of"
                " two in fp16. Compute the loss in fp32 to lift this."
            )

    # --- steps -------------------------------------------------------------------------------------------------------------

    def may_step(self, optimizer: Optimizer) -> bool:
        """Decide whether an optimizer steps; a dropped step is counted here.

        One device-to-host sync for each round, and one for each later optimizer of the round if there are several ranks or its
        gradients were written to since backward; more on an overflow.

        Returns:
            False if the step is to be dropped. True also for an optimizer without any gradient.

        Raises:
            FloatingPointError: too many steps in a row were dropped, or one was although the scale was at its floor. Nothing
                was changed by then.
        """
        with_gradient = [param for param in _parameters(optimizer) if param.grad is not None]
        if not with_gradient and not _is_distributed():
            return True
        round_ = self._round
        if self.is_active and not round_.losses and not self._unscaled_reported:
            self._unscaled_reported = True
            rank_zero_warn(
                "An optimizer steps on gradients that no manual_backward made, so that the loss was not scaled, and small"
                " gradients may be lost. Call self.manual_backward(loss), not loss.backward()."
            )
        unmeasured = self._unmeasured(with_gradient)
        if round_.measured is None:
            round_.measured, is_suspect = self._measure(unmeasured)
        else:
            is_suspect = self._on_any_rank(bool(self._overflowed) or bool(unmeasured and _any_nonfinite(unmeasured)))
        round_.has_stepped = True
        measured = round_.measured
        if not is_suspect and not measured.overflow and measured.loss_is_finite:
            return True
        self._search()
        overflowed = self._on_any_rank(any(id(param) in self._overflowed for param in with_gradient))
        if not overflowed and not measured.loss_is_finite and not self._on_any_rank(bool(self._overflowed)):
            # gradients that a non-finite loss made, finite as they are
            overflowed = self._on_any_rank(len(unmeasured) < len(with_gradient))
        if not overflowed:
            return True
        self._skip(optimizer, measured)
        return False

    def _unmeasured(self, params: list[Any]) -> list[Tensor]:
        """Those gradients that were written to, or made, since the round's last backward was measured."""
        round_ = self._round
        if not self._may_edit_gradients and round_.losses and not round_.has_stepped:
            return []
        marks = [(param.grad, round_.measured_grads.get(id(param))) for param in params]
        return [grad for grad, mark in marks if mark is None or not mark.fits(grad)]

    def count_applied(self, optimizer: Optimizer) -> None:
        """Count a step that was made. One without any gradient is neither applied nor skipped."""
        self.last_step_skipped = False
        if any(param.grad is not None for param in _parameters(optimizer)):
            self.applied_steps += 1
            self._consecutive_skips[self._position(optimizer)] = 0
            self._overflowed_at_floor.discard(self._position(optimizer))

    def _measure(self, unmeasured: list[Tensor]) -> tuple[Measured, bool]:
        """Read what the device knows of the round, and whether gradients have to be searched: one device-to-host sync.

        Args:
            unmeasured: gradients that were not measured as backward made them.
        """
        round_, device = self._round, self._device
        zero = torch.zeros((), device=device)
        suspect = _any_nonfinite(unmeasured).to(device, torch.float32) if unmeasured else zero
        largest = [_largest(some, zero) for some in (round_.fresh, round_.sums, round_.losses)]
        # without NaN, of which not every backend finds the maximum
        values = torch.stack([*largest, suspect + 1.0 if self._overflowed else suspect]).nan_to_num_(
            math.inf, math.inf, math.inf
        )
        if _is_distributed():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        fresh, sums, loss, is_suspect = values.tolist()
        overflow = math.inf in (fresh, sums)
        is_known = fresh > 0.0 and not overflow
        self.headroom_bits = math.log2(FP16_MAX / fresh) if is_known and self.is_fp16 else None
        self._history.append(self.gradient_scale)
        return Measured(fresh / self.gradient_scale if is_known else None, overflow, loss == 0.0), bool(is_suspect)

    def _on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. One device-to-host sync if there are several."""
        if not _is_distributed():
            return flag
        value = torch.tensor(float(flag), device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value.item())

    @property
    def _device(self) -> torch.device:
        return next((param.device for _, param in self._named.values()), torch.device("cpu"))

    def _search(self) -> None:
        """Find the gradients that are not finite. One device-to-host sync."""
        found = _nonfinite([param for _, param in self._named.values() if param.grad is not None])
        self._overflowed = set(map(id, found))

    def _overflowed_names(self) -> list[str]:
        """The names of those on any rank, in the order in which backward meets them: the module's, reversed."""
        names = [name for key, (name, _) in reversed(self._named.items()) if key in self._overflowed]
        if _is_distributed():
            of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(of_ranks, names)
            names = list(dict.fromkeys(chain(*of_ranks)))
        return names

    def _position(self, optimizer: Optimizer) -> int:
        return next((i for i, known in enumerate(self._optimizers) if known is optimizer), len(self._optimizers))

    def _skip(self, optimizer: Optimizer, measured: Measured) -> None:
        position = self._position(optimizer)
        in_row = self._consecutive_skips.get(position, 0) + 1
        self._consecutive_skips[position] = in_row
        self.last_step_skipped = True
        self.skipped_steps += 1
        # torch then knows that a step was asked for, and does not warn that a scheduler was first
        optimizer._opt_called = True  # type: ignore[attr-defined]
        names = self._overflowed_names()
        if not measured.loss_is_finite:
            self.nonfinite_losses += 1
            reason = "the loss is not finite"
        else:
            self.last_overflow = names[0] if names else None
            reason = f"gradients overflowed{f' (first in {names[0]})' if names else ''}"
        at_floor = measured.loss_is_finite and self._scale.is_at_floor
        is_stuck = at_floor and position in self._overflowed_at_floor
        if at_floor:
            self._overflowed_at_floor.add(position)
        if is_stuck or in_row >= self._max_consecutive_skips:
            raise FloatingPointError(self._why_it_stops(names, measured, in_row))
        if in_row & (in_row - 1) == 0:  # the first, second, fourth, ... in a row
            say = rank_zero_warn if in_row >= 8 else rank_zero_info
            scale = f" at loss scale {self.gradient_scale:g}; the next is {self.scale.scale:g}" if self.is_active else ""
            say(
                f"Optimizer step skipped, {in_row} in a row: {reason}{scale}. {self.skipped_steps} skipped and"
                f" {self.applied_steps} applied so far."
            )

    def _why_it_stops(self, names: list[str], measured: Measured, in_row: int) -> str:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        history = " ".join(f"{scale:g}" for scale in self._history)
        scale = f"; the loss scale is {self.gradient_scale:g} (of late: {history})" if self.is_active else ""
        fp16 = " keep the modules concerned in fp32 with fp32_modules, or use 'bf16-master', which has fp32's range;"
        if not measured.loss_is_finite:
            what = "The loss itself was not finite, so this is not a matter of loss scaling"
            cause = " activations beyond 65504 are infinite in fp16:" + fp16 if self.is_fp16 else ""
            remedy = f"{cause} look for NaN in the data, a division by zero or a logarithm of zero; lower the learning rate."
        elif self._all_nan():
            what = "The loss was finite, and gradients are NaN, not infinite, which no scale cures"
            remedy = " look for a square root or norm of zero, or 0/0, in the module named first; lower the learning rate."
        else:
            what = "The loss was finite"
            smaller = (
                " allow a smaller scale (min_scale);" if isinstance(self._scale, DynamicLossScale | AdaptiveLossScale) else ""
            )
            smaller = " use loss_scale='adaptive';" if isinstance(self._scale, StaticLossScale | NoLossScale) else smaller
            remedy = f"{fp16 + smaller if self.is_fp16 else ''} lower the learning rate, or the size of the loss."
        return (
            f"{in_row} optimizer steps in a row were skipped{scale}. First parameters with non-finite gradients, in the order"
            f" of backward: {shown or 'none'}. {what}:{remedy} Raise max_consecutive_skips to go on for longer. Weights,"
            " optimizer state and saved checkpoints are as after the last applied step."
        )

    def _all_nan(self) -> bool:
        """Whether gradients that are not finite are NaN and none is infinite. One device-to-host sync for each."""
        grads = [param.grad for key, (_, param) in self._named.items() if key in self._overflowed and param.grad is not None]
        return bool(grads) and not any(torch.isinf(grad._values() if grad.is_sparse else grad).any() for grad in grads)

    # --- checkpoints -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, numbers and strings.

        Keys: ``loss_scale`` (the scaler's state), ``applied_steps``, ``skipped_steps``, ``nonfinite_losses``,
        ``last_step_skipped``, ``last_overflow``, and by the optimizer's position ``consecutive_skips`` and
        ``overflowed_at_floor`` (the positions of those whose last skipped steps include such an overflow).
        """
        in_row = self._consecutive_skips
        return {
            "loss_scale": self.scale.state_dict(),
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "nonfinite_losses": self.nonfinite_losses,
            "last_step_skipped": self.last_step_skipped,
            "last_overflow": self.last_overflow,
            "overflowed_at_floor": sorted(self._overflowed_at_floor),
            "consecutive_skips": [in_row.get(position, 0) for position in range(max(in_row, default=-1) + 1)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; what is missing starts afresh, and is named in the log."""
        defaults: dict[str, Any] = {"applied_steps": 0, "skipped_steps": 0, "nonfinite_losses": 0, "last_step_skipped": False}
        defaults |= {"last_overflow": None, "consecutive_skips": [], "overflowed_at_floor": []}
        missing = [key for key in ("loss_scale", *defaults) if key not in state]
        if missing:
            rank_zero_info(f"The checkpoint has no {', '.join(missing)} of loss scaling; they start afresh.")
        for key, default in defaults.items():
            if key not in ("consecutive_skips", "overflowed_at_floor"):
                setattr(self, key, state.get(key, default))
        self._consecutive_skips = dict(enumerate(state.get("consecutive_skips", [])))
        self._overflowed_at_floor = set(state.get("overflowed_at_floor", []))
        saved = state.get("loss_scale")
        if saved is not None and self.is_active and saved.get("kind") != "none":
            self.scale = self._scale.load_state_dict(saved)


def _parameters(optimizer: Optimizer) -> Iterable[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _nonfinite(params: list[Any]) -> list[Any]:
    """Those whose gradient is not finite. One device-to-host sync."""
    if not params:
        return []
    are_finite = _are_finite([param.grad for param in params]).tolist()
    return [param for param, is_finite in zip(params, are_finite, strict=True) if not is_finite]


def _any_nonfinite(grads: list[Tensor]) -> Tensor:
    return ~_are_finite(grads).all()


def _largest(values: list[Tensor], zero: Tensor) -> Tensor:
    values = [value.to(zero.device, zero.dtype) for value in values]
    return zero if not values else values[0] if len(values) == 1 else torch.stack(values).max()


def _are_finite(grads: list[Tensor]) -> Tensor:
    elements = [grad.detach()._values() if grad.is_sparse else grad.detach() for grad in grads]
    return torch.stack([torch.isfinite(values).all().to(grads[0].device) for values in elements])


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
