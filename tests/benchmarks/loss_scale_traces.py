"""Loss scalers on simulated gradient magnitudes: unused headroom against skipped steps.

    python -m tests.benchmarks.loss_scale_traces [--steps 20000] [--seeds 10]

A trace is log2 of the largest gradient magnitude (amax) of each step. A step overflows, and is skipped, when amax times the
scale exceeds 65504, fp16's largest number. Unused headroom is log2(65504 / (amax * scale)), averaged over the other steps: the
bits of fp16's range that the scaler gave away at the small end.

How the traces are made, all from a seed:

- The level is uniform in log2 from 2^-11 to 2^-5: a gradient of norm 1/4 to 1 over 10^7 to 10^9 parameters has a root mean
  square of 2^-12 to 2^-17, and the largest element was 2^6 to 2^7 times that in byte GPTs of 0.4 and 3 million parameters.
  All scalers start at 2^15.
- White noise is Gaussian in log2, with a standard deviation of 0.5 bits. The smaller byte GPT (batches of 8 x 64 bytes, fp32,
  6000 steps) had 0.55 bits, hardly correlated (0.1 from step to step), with a kurtosis of 3.0.
- Autocorrelated noise is the sum of white noise and a first-order autoregression (0.98 from step to step), 0.4 bits each.
  All regimes below but the heavy tail have it.
- Drift: 5 bits up or down over the trace, linear in log2; the byte GPT drifted upwards by 0.23 bits per 1000 steps.
- Jump: from the middle on, all gradients are larger by 5 or 10 bits.
- Heavy tail: white noise of Student's t with 3 degrees of freedom times 0.4 bits; one step in 2000 is 5 bits above the level.
- Spikes: 0.5 % of the steps are larger by an exponentially distributed number of bits, 3 on average.
- Warm-up decay: gradients start 8 bits above their level and approach it with a time constant of 1000 steps.

Two rows have no required bound. "already right": a level of 2^-1, for which 2^15 is the right scale to begin with, as it was
for the small byte GPT; an adaptive scale has little to gain there. "hidden overflow": what overflows is 3 bits larger than what
the scaler is told of, as when gradients inside the network exceed those of the parameters.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from lightning_mp.numerics.loss_scale import AdaptiveLossScale, DynamicLossScale, LossScale

Trace = NDArray[np.float64]  # (steps,) log2 of amax
LOG2_FP16_MAX = math.log2(65504)
HIDDEN_BITS = 3.0

SCALERS: dict[str, LossScale] = {
    "dynamic 2000": DynamicLossScale(growth_interval=2000),
    "dynamic 200": DynamicLossScale(growth_interval=200),
    "adaptive": AdaptiveLossScale(),
}


def white(rng: Generator, steps: int, sd: float = 0.5) -> Trace:
    return rng.normal(0.0, sd, steps)


def autocorrelated(rng: Generator, steps: int, sd: float = 0.4, rho: float = 0.98) -> Trace:
    shocks = rng.normal(0.0, sd * math.sqrt(1 - rho**2), steps)
    values = np.empty(steps)
    value = rng.normal(0.0, sd)
    for step in range(steps):
        value = rho * value + shocks[step]
        values[step] = value
    return values + white(rng, steps, sd)


def level(rng: Generator) -> float:
    return float(rng.uniform(-11, -5))


def steady(rng: Generator, steps: int) -> Trace:
    return level(rng) + autocorrelated(rng, steps)


def drift(bits: float) -> Callable[[Generator, int], Trace]:
    return lambda rng, steps: steady(rng, steps) + np.linspace(0.0, bits, steps)


def jump(bits: float) -> Callable[[Generator, int], Trace]:
    return lambda rng, steps: steady(rng, steps) + bits * (np.arange(steps) >= steps // 2)


def heavy_tail(rng: Generator, steps: int) -> Trace:
    return level(rng) + 0.4 * rng.standard_t(3, steps)


def spikes(rng: Generator, steps: int) -> Trace:
    return steady(rng, steps) + (rng.random(steps) < 0.005) * rng.exponential(3.0, steps)


def warm_up_decay(rng: Generator, steps: int) -> Trace:
    return steady(rng, steps) + 8.0 * np.exp(-np.arange(steps) / 1000)


REGIMES: dict[str, Callable[[Generator, int], Trace]] = {
    "steady, white noise": lambda rng, steps: level(rng) + white(rng, steps),
    "steady, autocorrelated": steady,
    "drift up 5 bits": drift(5.0),
    "drift down 5 bits": drift(-5.0),
    "jump up 5 bits": jump(5.0),
    "jump up 10 bits": jump(10.0),
    "heavy tail": heavy_tail,
    "spikes": spikes,
    "warm-up decay": warm_up_decay,
}
UNBOUNDED = {
    "already right": lambda rng, steps: -1.0 + autocorrelated(rng, steps),
    "hidden overflow": steady,
}


@dataclass(frozen=True)
class Outcome:
    """What a scaler did on traces of one regime.

    Attributes:
        headroom_bits: unused headroom, mean over the steps that were not skipped.
        skipped: skipped steps, mean over the traces.
        longest_run: the longest run of skipped steps in any trace.
    """

    headroom_bits: float
    skipped: float
    longest_run: int


def simulate(scaler: LossScale, trace: Trace, hidden_bits: float = 0.0) -> Outcome:
    headroom_sum = 0.0
    skipped = run = longest_run = 0
    for log2_amax in trace.tolist():
        headroom = LOG2_FP16_MAX - log2_amax - hidden_bits - math.log2(scaler.scale)
        if headroom < 0:
            skipped += 1
            run += 1
            longest_run = max(longest_run, run)
            scaler = scaler.update(finite=False)
        else:
            run = 0
            headroom_sum += headroom
            scaler = scaler.update(finite=True, amax=2.0**log2_amax)
    return Outcome(headroom_sum / (len(trace) - skipped), skipped, longest_run)


def outcome(scaler: LossScale, regime: str, steps: int, seeds: int) -> Outcome:
    """The scaler on traces of the regime, of seeds 0, 1, ...; every scaler meets the same ones."""
    make = {**REGIMES, **UNBOUNDED}[regime]
    hidden_bits = HIDDEN_BITS if regime == "hidden overflow" else 0.0
    each = [simulate(scaler, make(np.random.default_rng(seed), steps), hidden_bits) for seed in range(seeds)]
    return Outcome(
        statistics.fmean(one.headroom_bits for one in each),
        statistics.fmean(one.skipped for one in each),
        max(one.longest_run for one in each),
    )


def bounds(dynamic_2000: Outcome, regime: str, steps: int) -> Outcome:
    """What is required of the adaptive scaler, given what the dynamic one did."""
    return Outcome(
        headroom_bits=dynamic_2000.headroom_bits - 1.5,
        skipped=max(dynamic_2000.skipped + 2, steps / 1000),
        longest_run=4 if regime == "jump up 10 bits" else steps,
    )


def meets(found: Outcome, bound: Outcome) -> bool:
    return (
        found.headroom_bits <= bound.headroom_bits and found.skipped <= bound.skipped and found.longest_run <= bound.longest_run
    )


def line(cells: Sequence[str]) -> str:
    return cells[0].ljust(24) + "".join(cell.rjust(22) for cell in cells[1:])


def show(one: Outcome) -> str:
    return f"{one.headroom_bits:.2f} {one.skipped:7.1f} {one.longest_run:4d}"


def show_bound(one: Outcome, steps: int) -> str:
    run = "-" if one.longest_run == steps else str(one.longest_run)
    return f"{one.headroom_bits:.2f} {one.skipped:7.1f} {run:>4}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    print(f"python -m tests.benchmarks.loss_scale_traces --steps {args.steps} --seeds {args.seeds}")
    print(f"Python {platform.python_version()}, numpy {np.__version__}; the scalers have their defaults and start at 2^15")
    print("each cell: mean unused headroom in bits, mean skipped steps, longest run of skipped steps in any trace")
    print()
    print(line(["regime", *SCALERS, "required of adaptive", "met"]))
    all_met = True
    for regime in [*REGIMES, *UNBOUNDED]:
        found = {name: outcome(scaler, regime, args.steps, args.seeds) for name, scaler in SCALERS.items()}
        required, verdict = "-", "-"
        if regime in REGIMES:
            bound = bounds(found["dynamic 2000"], regime, args.steps)
            met = meets(found["adaptive"], bound)
            all_met = all_met and met
            required, verdict = show_bound(bound, args.steps), "yes" if met else "NO"
        print(line([regime, *(show(one) for one in found.values()), required, verdict]), flush=True)
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
