"""Loss scalers: what multiplies an fp16 loss before backward, and how that number follows the gradients.

fp16 holds magnitudes from 2^-24 to 65504. Gradients are mostly small, so the loss is multiplied by a scale, a power of two,
and the gradients are divided by it again, in fp32: a gradient of 2^-30 is lost in fp16, at a scale of 2^20 it is 2^-10. If
the scale is too large, a gradient overflows, and the step has to be skipped. All scalers keep one rule: **back off on
overflow, grow after a run of healthy steps.** Each is a frozen value; ``update`` returns the next one.

``DynamicLossScale`` knows of each step only whether it overflowed. It doubles the scale every 2000 healthy steps until it
overflows: slow where the right scale is far from the first one, and at the cost of a skipped step for each probe.

``AdaptiveLossScale``, the default for fp16, reads the size of the gradients, which the check for overflow yields anyway.

Method. With ``a`` the largest unscaled gradient magnitude of a step (amax), the step overflows when ``a * scale > 65504``.
A window holds ``log2(a)`` of the last healthy steps; ``Q`` is its upper ``1 - overflow_probability`` quantile::

    k     = floor(overflow_probability * n) + 1              n samples in the window
    f     = 2 (1 - log n / log window)                       few samples hide the largest; 0 for a full window
    Q     = max(the k-th largest of the window + f, b)       b: see "An overflow"
    scale = 2 ^ floor(log2(65504) - margin - Q)

Worked number: gradients of at most 0.004 over a full window give Q = log2(0.004) = -7.97. With a margin of 0.25 bits the
exponent is floor(16.00 - 0.25 + 7.97) = 23, so the scale is 2^23, and the largest scaled gradient 33554, within a bit of
65504.

*A healthy step* moves the scale to the formula's value at once if that is lower, and by at most ``growth_bits`` towards it if
that is higher. Only the first of all goes there in one leap: any size that was seen is a better guess than ``init_scale``. A
healthy step proves that no fp16 gradient exceeded 65504 / scale, so a larger ``a`` (of gradients that were formed in fp32)
enters as 65504 / scale: one outlier costs a bit or two, not the scale.
An ``a`` that is 0, absent or not finite has no logarithm and says nothing: the state stays as it is.

*An overflow* lowers the scale at once: by 1 bit, and if the next step overflows too by 2, 4, 8, 8, ... bits, so a jump of
the gradients by 10 bits costs at most 4 steps. All that is known of ``a`` is that it exceeded 65504 / scale: a sample that
is censored from the right. Its true place in the order is unknown, so it is not given one: ``Q`` is held at or above that
bound ``b = log2(65504 / scale)`` for 32 healthy steps. After that the window has samples of its own, or the cause has gone.

*The margin* is learned, because a window of some hundred samples cannot show what happens once in thousands of steps, and
because a gradient inside the network can overflow though all that arrive at the parameters are small. It starts at
``margin_bits``; each run of overflows adds 0.5 bits, and each healthy step takes 0.5 * overflow_probability bits off, down
to ``margin_bits``. This tracks the quantile without assumptions on the distribution: what was added is either taken off
again or still there, so after N healthy steps, whatever the gradients did, ::

    runs of overflows <= overflow_probability * N + (margin - margin_bits) / 0.5

up to the largest margin, ``margin_bits`` + 12. (Gibbs and Candes 2021, "Adaptive Conformal Inference Under Distribution
Shift", bound errors by the same kind of recursion.) A run of overflows is one event: its length is a matter of the backoff.

Trade-offs. The scale is a power of two, so half a bit of headroom is lost to rounding on average; that is also a margin.
With log-normal noise of 0.5 bits and the default probability some 2.1 bits of headroom are the least possible, so a scaler
that already stands at the right scale cannot be beaten by much: the gain is where the right scale is far away or moves. The
window forgets slowly when gradients shrink (128 steps), which costs resolution and no step. NaN that no scale can cure, such
as from bad data, looks like overflow; the bounds on backoff, on ``b`` in time and on the margin limit what it can do.

Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 (loss scaling; back off and grow). torch's
``GradScaler``, NVIDIA apex and Megatron for the rules of ``DynamicLossScale``. Zhao et al. 2019, "Adaptive Loss Scaling for
Mixed Precision Training" for scales from statistics of the gradients.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

_log = logging.getLogger(__name__)
_Scaler = TypeVar("_Scaler", bound="LossScale")

FP16_MAX = 65504.0
LOG2_FP16_MAX = math.log2(FP16_MAX)  # 15.9993
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
FP32_SMALLEST_NORMAL = 2.0**-126

MARGIN_STEP_BITS = 0.5  # what a run of overflows adds to the margin
MARGIN_RANGE_BITS = 12.0  # of fp16's 40 binades; more would be learned only from NaN that no scale cures
FEW_SAMPLES_BITS = 2.0  # added to a quantile of one sample
CENSORED_STEPS = 32  # healthy steps for which an overflow bounds the scale
FASTEST_BACKOFF_BITS = 8

HysteresisMode = Literal["cumulative", "consecutive"]


class LossScale(ABC):
    """What multiplies the loss before backward, and how it follows the gradients. A frozen value.

    Attributes:
        scale: the multiplier for the next backward.
    """

    kind: ClassVar[str]
    scale: float

    @abstractmethod
    def update(self: _Scaler, *, finite: bool, amax: float | None = None) -> _Scaler:
        """Return the state after one optimizer step.

        Args:
            finite: no unscaled gradient of the step was infinite or NaN.
            amax: the largest magnitude among the step's unscaled gradients. None, 0 and what is not finite mean that it is
                unknown. Ignored if not ``finite``.
        """

    @property
    def is_at_floor(self) -> bool:
        """Whether an overflow now could not lower the scale. Never, for a scaler that has no floor."""
        return False

    def with_scale(self: _Scaler, scale: float) -> _Scaler:
        """Return the same state with another present scale, bounded by the scaler's limits.

        Raises:
            ValueError: ``scale`` is not a finite number above 0.
        """
        return self._next(scale=self._bounded(_positive("scale", scale)))

    def state_dict(self) -> dict[str, Any]:
        """Every field, settings included, as plain numbers, strings and lists, and the ``kind`` of scaler."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind} | {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def load_state_dict(self: _Scaler, state: Mapping[str, Any]) -> _Scaler:
        """Return the saved state; ``self`` is frozen and does not change.

        Saved values win over those of the constructor, settings included. Missing keys keep this object's values and unknown
        ones are ignored; both are named in the log. Of another kind of scaler only the scale is taken over.

        Raises:
            ValueError: a saved value is not legal; the message names the key.
        """
        kind = state.get("kind", self.kind)
        if kind != self.kind:
            return self._take_over(kind, state)
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        _log_keys("lacks %s; the present values stay", [name for name in ("kind", *names) if name not in state])
        _log_keys("has unknown keys %s; they are ignored", [name for name in state if name not in ("kind", *names)])
        restored = self._next(**{name: state[name] for name in names if name in state})
        restored._validate()
        bounded = restored._bounded(restored.scale)
        if bounded != restored.scale:
            _log.warning("The saved loss scale %g is outside its limits; it continues at %g.", restored.scale, bounded)
        return restored._next(scale=bounded)

    def _take_over(self: _Scaler, kind: object, state: Mapping[str, Any]) -> _Scaler:
        if kind == NoLossScale.kind or "scale" not in state:
            # a run without scaling says nothing about the right scale
            _log.warning("The saved state is of a %r loss scaler, without a scale; this one starts at %g.", kind, self.scale)
            return self
        taken = self.with_scale(state["scale"])
        _log.warning(
            "The saved state is of a %r loss scaler, this one is %r: it takes over the scale %g and nothing else.",
            kind,
            self.kind,
            taken.scale,
        )
        return taken

    def _next(self: _Scaler, **changes: Any) -> _Scaler:
        """Copy with some fields changed, unchecked. `dataclasses.replace` would reset the state fields."""
        following = object.__new__(type(self))
        following.__dict__.update(self.__dict__, **changes)
        return following

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _bounded(self, scale: float) -> float:
        # where the scale and its reciprocal are normal numbers
        return min(max(scale, FP32_SMALLEST_NORMAL), FP32_MAX)

    def _validate(self) -> None:
        """Check every field, and convert those of another numeric type. Only for an object that nobody has seen yet."""
        self._set("scale", _in_fp32("scale", self.scale))


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """No loss scaling: the scale is always 1.

    Example:
        >>> from lightning_mp import NoLossScale
        >>> NoLossScale().update(finite=False).scale
        1.0
    """

    kind: ClassVar[str] = "none"
    scale: float = field(init=False, default=1.0)

    def update(self, *, finite: bool, amax: float | None = None) -> NoLossScale:
        """Return the same state."""
        return self

    def _bounded(self, scale: float) -> float:
        return 1.0


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A loss scale that never changes.

    Args:
        scale: the multiplier of the loss; a power of two keeps scaling and unscaling exact.

    Raises:
        ValueError: ``scale`` is not a finite number above 0.

    Example:
        >>> from lightning_mp import StaticLossScale
        >>> StaticLossScale(1024).update(finite=False).scale
        1024.0
    """

    kind: ClassVar[str] = "static"
    scale: float

    def __post_init__(self) -> None:
        self._validate()

    def update(self, *, finite: bool, amax: float | None = None) -> StaticLossScale:
        """Return the same state."""
        return self


class _BoundedLossScale(LossScale):
    """What scalers with limits share."""

    init_scale: float
    min_scale: float
    max_scale: float

    @property
    def is_at_floor(self) -> bool:
        """Whether an overflow now could not lower the scale."""
        return self.scale <= self.min_scale

    def _bounded(self, scale: float) -> float:
        return min(max(scale, self.min_scale), self.max_scale)

    def _validate(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            self._set(name, _in_fp32(name, getattr(self, name)))
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale is {self.init_scale:g}, but must lie between min_scale = {self.min_scale:g} and "
                f"max_scale = {self.max_scale:g}; change one of the three."
            )
        super()._validate()


@dataclass(frozen=True)
class DynamicLossScale(_BoundedLossScale):
    """Back off on overflow, grow after a run of healthy steps: the rule of torch's GradScaler, apex and Megatron.

    Args:
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after ``growth_interval`` healthy steps in a row. Growth beyond
            ``max_scale`` is refused: the scale stays.
        backoff_factor: the scale is multiplied by it on an overflow, down to ``min_scale``.
        growth_interval: healthy steps in a row before growth.
        hysteresis: the overflow that backs off: 1 is every one, 2 forgives the first.
        hysteresis_mode: when the forgiven overflows are given back. ``"cumulative"``: by a completed run of healthy steps
            (Megatron); ``"consecutive"``: by any healthy step (apex).
        min_scale: the floor.
        max_scale: the ceiling. By default the largest power of two in fp32: the scale seeds the backward of an fp32 loss, and
            overflows end the growth long before.

    Attributes:
        scale: the multiplier for the next backward.
        streak: healthy steps since the last change of scale or overflow.
        hysteresis_left: overflows until the next one that backs off, that one included; 0 after it.

    Raises:
        ValueError: a setting is not legal.

    Example:
        >>> from lightning_mp import DynamicLossScale
        >>> scaler = DynamicLossScale(init_scale=256, growth_interval=2)
        >>> scaler = scaler.update(finite=False)  # the step is skipped
        >>> scaler.scale
        128.0
        >>> scaler.update(finite=True).update(finite=True).scale
        256.0
    """

    kind: ClassVar[str] = "dynamic"
    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_mode: HysteresisMode = "cumulative"
    min_scale: float = 1.0
    max_scale: float = 2.0**127
    scale: float = field(init=False)
    streak: int = field(init=False)
    hysteresis_left: int = field(init=False)

    def __post_init__(self) -> None:
        self._set("scale", self.init_scale)
        self._set("streak", 0)
        self._set("hysteresis_left", self.hysteresis)
        self._validate()

    def update(self, *, finite: bool, amax: float | None = None) -> DynamicLossScale:
        """Return the state after one optimizer step. ``amax`` is not used."""
        return self._after_healthy_step() if finite else self._after_overflow()

    def _after_overflow(self) -> DynamicLossScale:
        left = max(self.hysteresis_left - 1, 0)
        scale = self.scale if left else max(self.scale * self.backoff_factor, self.min_scale)
        return self._next(scale=scale, streak=0, hysteresis_left=left)

    def _after_healthy_step(self) -> DynamicLossScale:
        is_complete = self.streak + 1 >= self.growth_interval
        refills = is_complete or self.hysteresis_mode == "consecutive"
        grown = self.scale * self.growth_factor
        return self._next(
            scale=grown if is_complete and grown <= self.max_scale else self.scale,
            streak=0 if is_complete else self.streak + 1,
            hysteresis_left=self.hysteresis if refills else self.hysteresis_left,
        )

    def _validate(self) -> None:
        super()._validate()
        self._set("growth_factor", _positive("growth_factor", self.growth_factor))
        self._set("backoff_factor", _positive("backoff_factor", self.backoff_factor))
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor is {self.growth_factor:g}, but must be above 1, as 2.")
        if self.backoff_factor >= 1:
            raise ValueError(f"backoff_factor is {self.backoff_factor:g}, but must be below 1, as 0.5.")
        _whole("growth_interval", self.growth_interval, at_least=1)
        _whole("hysteresis", self.hysteresis, at_least=1)
        if self.hysteresis_mode not in ("cumulative", "consecutive"):
            raise ValueError(f"hysteresis_mode is {self.hysteresis_mode!r}, but must be 'cumulative' or 'consecutive'.")
        _whole("streak", self.streak, at_least=0)
        _whole("hysteresis_left", self.hysteresis_left, at_least=0)
        self._set("hysteresis_left", min(self.hysteresis_left, self.hysteresis))  # of a state that lacked `hysteresis`


@dataclass(frozen=True)
class AdaptiveLossScale(_BoundedLossScale):
    """Sizes the scale from the gradients themselves; the method stands at the top of the module.

    It has to be told ``amax``: without it the scale can only fall.

    Args:
        init_scale: the first scale.
        window: the scale is sized by the gradients of this many healthy steps.
        overflow_probability: at most this share of steps may overflow in the long run, jumps of the gradients aside. A larger
            one uses more of fp16's range.
        margin_bits: the least distance, in bits, between the largest gradients of the window and fp16's largest number,
            before the scale is rounded down to a power of two.
        growth_bits: by how many bits a healthy step may raise the scale. The first one is not limited.
        min_scale: the floor. Below 1 by default, because gradients above 65504 need it.
        max_scale: the ceiling. By default 2^64, for gradients of at most 2^-48: what is smaller is as good as zero to an
            optimizer, and a loss of up to 2^63 can still be scaled in fp32.

    Attributes:
        scale: the multiplier for the next backward.
        streak: healthy steps of known ``amax`` since the last overflow.
        overflows_in_a_row: overflows since the last healthy step of known ``amax``.
        margin: the present margin in bits, learned from overflows.
        log2_amax: the window, oldest first.
        censored: the lower bound on log2 of amax that the last overflow gave, while it still counts; else empty.

    Raises:
        ValueError: a setting is not legal.

    Example:
        >>> import math
        >>> from lightning_mp import AdaptiveLossScale
        >>> scaler = AdaptiveLossScale(init_scale=2**21)
        >>> for _ in range(128):
        ...     scaler = scaler.update(finite=True, amax=0.004)
        >>> math.log2(scaler.scale)
        23.0
        >>> math.log2(scaler.update(finite=False).scale)
        22.0
    """

    kind: ClassVar[str] = "adaptive"
    init_scale: float = 2.0**15
    window: int = 128
    overflow_probability: float = 5e-4
    margin_bits: float = 0.25
    growth_bits: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**64
    scale: float = field(init=False)
    streak: int = field(init=False)
    overflows_in_a_row: int = field(init=False)
    margin: float = field(init=False)
    log2_amax: tuple[float, ...] = field(init=False, repr=False)
    censored: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._set("scale", self.init_scale)
        self._set("streak", 0)
        self._set("overflows_in_a_row", 0)
        self._set("margin", self.margin_bits)
        self._set("log2_amax", ())
        self._set("censored", ())
        self._validate()

    def update(self, *, finite: bool, amax: float | None = None) -> AdaptiveLossScale:
        """Return the state after one optimizer step. An ``amax`` that is unknown leaves a healthy step without effect."""
        if not finite:
            return self._after_overflow()
        if amax is None or not 0.0 < amax < math.inf:  # also NaN
            return self
        return self._after_healthy_step(math.log2(amax))

    def _after_overflow(self) -> AdaptiveLossScale:
        run = self.overflows_in_a_row
        backoff_bits = min(2**run, FASTEST_BACKOFF_BITS)
        learned = MARGIN_STEP_BITS if run == 0 else 0.0  # the length of a run says nothing about how often they happen
        return self._next(
            scale=max(math.ldexp(self.scale, -backoff_bits), self.min_scale),
            streak=0,
            overflows_in_a_row=run + 1,
            margin=min(self.margin + learned, self.margin_bits + MARGIN_RANGE_BITS),
            censored=(max((self._largest_representable(), *self.censored)),),
        )

    def _after_healthy_step(self, log2_amax: float) -> AdaptiveLossScale:
        window = (*self.log2_amax, min(log2_amax, self._largest_representable()))[-self.window :]
        censored = self.censored if self.streak + 1 < CENSORED_STEPS else ()
        margin = max(self.margin - MARGIN_STEP_BITS * self.overflow_probability, self.margin_bits)
        bound = max((self._upper_quantile(window), *censored))
        growth_bits = self.growth_bits if self.log2_amax else 127
        return self._next(
            scale=self._towards(math.floor(LOG2_FP16_MAX - margin - bound), growth_bits),
            streak=self.streak + 1,
            overflows_in_a_row=0,
            margin=margin,
            log2_amax=window,
            censored=censored,
        )

    def _largest_representable(self) -> float:
        """Log2 of the largest unscaled gradient that fp16 holds at the present scale."""
        return LOG2_FP16_MAX - math.log2(self.scale)

    def _bits_for_few(self, samples: int) -> float:
        return FEW_SAMPLES_BITS * (1.0 - math.log(samples) / math.log(self.window)) if self.window > 1 else 0.0

    def _upper_quantile(self, window: tuple[float, ...]) -> float:
        above = int(self.overflow_probability * len(window))
        largest = sorted(window)[-1 - above] if above else max(window)
        return largest + self._bits_for_few(len(window))

    def _towards(self, exponent: int, growth_bits: int) -> float:
        """2^exponent, within the limits and at most ``growth_bits`` above the present scale."""
        highest = min(math.ldexp(self.scale, growth_bits), self.max_scale)
        # the exponent is clamped first: 2^1090, for an amax of 1e-323, is no float
        return max(min(math.ldexp(1.0, min(exponent, 127)), highest), self.min_scale)

    def _validate(self) -> None:
        super()._validate()
        _whole("window", self.window, at_least=1, at_most=1024)
        self._set("overflow_probability", _number("overflow_probability", self.overflow_probability))
        if not 0.0 < self.overflow_probability < 1.0:
            raise ValueError(
                f"overflow_probability is {self.overflow_probability:g}, but must lie between 0 and 1; try 0.0005."
            )
        self._set("margin_bits", _number("margin_bits", self.margin_bits))
        if not 0.0 <= self.margin_bits <= LOG2_FP16_MAX:
            raise ValueError(f"margin_bits is {self.margin_bits:g}, but must lie between 0 and {LOG2_FP16_MAX:.0f} bits.")
        _whole("growth_bits", self.growth_bits, at_least=1, at_most=64)
        _whole("streak", self.streak, at_least=0)
        _whole("overflows_in_a_row", self.overflows_in_a_row, at_least=0)
        margin = _number("margin", self.margin)
        # clamped: a state that lacked `margin_bits` or `window` need not fit this object's
        self._set("margin", min(max(margin, self.margin_bits), self.margin_bits + MARGIN_RANGE_BITS))
        self._set("log2_amax", _numbers("log2_amax", self.log2_amax)[-self.window :])
        self._set("censored", _numbers("censored", self.censored)[-1:])


def make_loss_scale(value: LossScale | float | str) -> LossScale:
    """Return the loss scaler that a setting means.

    Args:
        value: a scaler, which is returned as it is; a number, for a scale that never changes; or ``"none"``, ``"dynamic"``,
            ``"adaptive"``, for that scaler with its defaults.

    Raises:
        ValueError: anything else.

    Example:
        >>> from lightning_mp.numerics.loss_scale import make_loss_scale
        >>> make_loss_scale(1024)
        StaticLossScale(scale=1024.0)
    """
    if isinstance(value, LossScale):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return StaticLossScale(value)
    if value == "none":
        return NoLossScale()
    if value == "dynamic":
        return DynamicLossScale()
    if value == "adaptive":
        return AdaptiveLossScale()
    raise ValueError(
        f"The loss scale is {value!r}, but must be 'none', 'dynamic' or 'adaptive', a number above 0 for a scale that never "
        "changes, or a LossScale such as DynamicLossScale(growth_interval=500)."
    )


def _number(name: str, value: object) -> float:
    """A finite number as a float. A bool is none: it would be 0 or 1 by accident."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, but must be a number.")
    if not abs(value) < 2.0**1023:  # also NaN, and integers that no float holds
        raise ValueError(f"{name} is {value!r}, but must be finite.")
    return float(value)


def _positive(name: str, value: object) -> float:
    number = _number(name, value)
    if number <= 0:
        raise ValueError(f"{name} is {value!r}, but must be above 0.")
    return number


def _in_fp32(name: str, value: object) -> float:
    number = _positive(name, value)
    if not FP32_SMALLEST_NORMAL <= number <= FP32_MAX:
        raise ValueError(
            f"{name} is {number:g}, but must be a normal fp32 number, from {FP32_SMALLEST_NORMAL:g} to {FP32_MAX:g}."
        )
    return number


def _numbers(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} is {values!r}, but must be a list of numbers.")
    return tuple(_number(f"{name}[{index}]", value) for index, value in enumerate(values))


def _whole(name: str, value: object, at_least: int, at_most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least or (at_most is not None and value > at_most):
        limit = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} is {value!r}, but must be a whole number, {limit}.")


def _log_keys(words: str, keys: list[str]) -> None:
    if keys:
        _log.warning("The saved state of the loss scaler " + words + ".", ", ".join(keys))
