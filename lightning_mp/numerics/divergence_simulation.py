"""How often the rule of ``divergence`` raises a false alarm, and how late it sees a true gap, in simulated runs.

**The model.** A run's loss is a curve plus noise; the curve is the same for all runs and cancels in the gap, so it is flat
here. The noise of 5,000 logged losses is a first-order autoregression, averaged into J blocks. Its size is set at 100 blocks: a
block mean of one run has a deviation of 0.03 nats, so that two seeds differ by 0.04, as was measured on a small byte-level
language model; of a pair the difference itself has 0.0006. With autocorrelation *between blocks* the block means themselves are
the autoregression, of the same size for each J: what slow drifts of whole runs do. The candidate's loss is raised by a gap that
is a multiple of the margin, 0.01 nats, from the first block on.

The arithmetic is that of ``DivergenceTest``, written again for many runs at once; a test holds the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_mp.numerics.divergence import LAMBDAS, SEED_NEIGHBOURS, SINGLE_SEED_WARM_UP, Rule, inflation
from lightning_mp.numerics.estimate import LARGEST_CORRELATION, MAD_TO_SD

POINTS = 5000
RUN_SD = 0.03  # nats, of a block mean of one run, at 100 blocks
PAIR_SD = 0.0006  # nats, of a block gap of a pair, at 100 blocks
BLOCKS = (50, 100, 200)
GAPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # margins

Noise = Literal["steps", "blocks"]
NOISES: tuple[tuple[Noise, float], ...] = (("steps", 0.0), ("steps", 0.5), ("steps", 0.9), ("blocks", 0.5), ("blocks", 0.9))


@dataclass(frozen=True)
class Alarms:
    """Where each of n simulated runs first reached the threshold.

    Attributes:
        block: (n,) int64, the block of the first alarm, -1 for none.
        evidence: (J, n) float64, the largest S over the threshold after each block.
    """

    block: Tensor
    evidence: Tensor

    @property
    def rate(self) -> float:
        """The part of the runs that alarmed."""
        return float((self.block >= 0).double().mean())

    @property
    def median_delay(self) -> float | None:
        """The median number of blocks up to the alarm, over the runs that alarmed."""
        alarmed = self.block[self.block >= 0]
        return float(alarmed.double().median()) + 1 if len(alarmed) else None


def simulate(
    candidate: Tensor, baseline: Tensor, *, paired: bool = False, rule: Rule | None = None, margin: float = 0.01
) -> Alarms:
    """Apply the rule to many runs at once.

    Args:
        candidate: (J, n) block means of n candidates, float64.
        baseline: (J, N, n) block means of the N seeds of each one's baseline.
        paired: whether each candidate is paired with the first seed of its baseline.
        rule: the settings; its margins are not used.
        margin: the margin d of every block, nats.
    """
    rule = rule or Rule()
    blocks, seeds, _ = baseline.shape
    gaps = candidate - (baseline[:, 0] if paired else baseline.mean(1))
    threshold = rule.threshold(blocks)
    weights = torch.tensor(LAMBDAS, dtype=gaps.dtype)[:, None]
    total = torch.zeros(len(LAMBDAS), gaps.shape[1], dtype=gaps.dtype)
    seed_scale = _seed_scale(baseline) if seeds > 1 and not paired else None
    single = seeds == 1 and not paired
    evidence = torch.zeros_like(gaps)
    for index in range(blocks):
        if seed_scale is not None:
            noise = seed_scale[index]
        else:
            noise = _past_scale(gaps[max(0, index - rule.window) : index], single)
        scale = noise.clamp(min=margin / 2) * (1.0 if paired else inflation(seeds))
        if not (single and index < SINGLE_SEED_WARM_UP):
            z = ((gaps[index] - margin) / scale).clamp(max=rule.clip)
            total = total.clamp(min=0) + weights * z - weights * weights / 2
        evidence[index] = total.amax(0).clamp(min=0) / threshold
    reached = evidence >= 1
    return Alarms(torch.where(reached.any(0), reached.int().argmax(0), -1), evidence)


def noise(series: int, runs: int, kind: Noise, correlation: float, sd: float, generator: torch.Generator) -> dict[int, Tensor]:
    """Block means of independent noise series: for each J of ``BLOCKS`` a tensor (J, series, runs) float64.

    With correlated steps these are the same steps, averaged into other blocks.

    Args:
        series: how many runs each comparison takes, the candidate among them.
        runs: how many comparisons.
        kind: whether neighbouring steps or neighbouring blocks are correlated.
        correlation: of neighbours.
        sd: the deviation of a block mean, at 100 blocks.
        generator: of the random numbers.
    """
    if kind == "blocks":
        return {
            j: sd * _autoregression(j, series * runs, correlation, generator).double().view(j, series, runs) for j in BLOCKS
        }
    finest = max(BLOCKS)  # the others divide it
    steps = _autoregression(POINTS, series * runs, correlation, generator).view(finest, POINTS // finest, series, runs)
    means = sd / _block_sd(POINTS // 100, correlation) * steps.mean(1).double()
    return {j: means.view(j, finest // j, series, runs).mean(1) for j in BLOCKS}


def binomial_upper_limit(events: int, n: int, confidence: float = 0.95) -> float:
    """The largest rate at which so few events of n still have a probability of 1 - confidence (Clopper and Pearson 1934)."""
    if events >= n:
        return 1.0
    low, high = events / n, 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(events + 1)]
    for _ in range(60):
        rate = (low + high) / 2
        if rate in (0.0, 1.0):
            break
        tail = sum(math.exp(log + k * math.log(rate) + (n - k) * math.log1p(-rate)) for k, log in enumerate(logs))
        low, high = (rate, high) if tail > 1 - confidence else (low, rate)
    return high


def print_table(runs: int, seed: int = 0) -> None:
    """Print the rate of alarms and their median delay in blocks, for each design, kind of noise and J."""
    generator = torch.Generator().manual_seed(seed)
    print(f"Part of {runs} runs that alarm, and the median delay in blocks; alpha = {Rule().alpha}. Gaps in margins.")
    header = "".join(f"{f'gap {gap:g}':>13}" for gap in GAPS)
    print(f"{'design':<14}{'correlation':<16}{'J':>4}{header}{'spike':>9}{'limit':>8}")
    for kind, correlation in NOISES:
        all_series = noise(6, runs, kind, correlation, RUN_SD, generator)
        all_pairs = noise(1, runs, kind, correlation, PAIR_SD, generator)
        for blocks in BLOCKS:
            series, pair = all_series[blocks], all_pairs[blocks]
            zero = torch.zeros_like(pair)
            for design, candidate, baseline, paired in (
                ("paired", pair[:, 0], zero, True),
                *((f"unpaired N={n}", series[:, 0], series[:, 1 : 1 + n], False) for n in (1, 2, 3, 5)),
            ):
                cells, limit = [], 0.0
                for gap in GAPS:
                    found = simulate(candidate + gap * Rule().margin, baseline, paired=paired)
                    delay = "" if found.median_delay is None else f" ({found.median_delay:.0f})"
                    cells.append(f"{f'{found.rate:.4f}{delay}':>13}")
                    limit = limit if gap else binomial_upper_limit(int((found.block >= 0).sum()), runs)
                spiked = candidate.clone()
                spiked[blocks // 2] += 1e30
                spike = simulate(spiked, baseline, paired=paired).rate
                row = f"{design:<14}{f'{correlation:g} of {kind}':<16}{blocks:>4}"
                print(f"{row}{''.join(cells)}{spike:>9.4f}{limit:>8.4f}", flush=True)
    print("spike: healthy but for one block of 1e30. limit: the upper 95% limit of the rate of healthy alarms.")


def _autoregression(length: int, series: int, correlation: float, generator: torch.Generator) -> Tensor:
    """(length, series) fp32, each column a first-order autoregression of variance 1."""
    values = torch.randn(length, series, generator=generator, dtype=torch.float32)
    innovation = math.sqrt(1 - correlation * correlation)
    if correlation:
        for index in range(1, length):
            values[index].mul_(innovation).add_(values[index - 1], alpha=correlation)
    return values


def _block_sd(size: int, correlation: float) -> float:
    """The deviation of the mean of ``size`` neighbours of a first-order autoregression of variance 1."""
    pairs = sum((1 - lag / size) * correlation**lag for lag in range(1, size))
    return math.sqrt((1 + 2 * pairs) / size)


def _past_scale(gaps: Tensor, single: bool) -> Tensor:
    """The noise scale from past gaps, (m, n) -> (n,)."""
    n = gaps.shape[0]
    if n < 2:
        return torch.zeros(gaps.shape[1], dtype=gaps.dtype)
    scale = MAD_TO_SD * _median(gaps.diff(dim=0).abs()) / math.sqrt(2.0)
    if not single or n < 3:
        return scale
    middle = _median(gaps)
    bound = 3 * MAD_TO_SD * _median((gaps - middle).abs())
    held = gaps.clamp(middle - bound, middle + bound)
    deviations = held - held.mean(0)
    squares = deviations.square().sum(0)
    r = (deviations[1:] * deviations[:-1]).sum(0) / squares
    r = r + (1 + 3 * r) / n
    r = (r + ((1 - r * r).clamp(min=0) / n).sqrt()).clamp(0, LARGEST_CORRELATION)
    return scale * torch.where(squares > 0, (1 + r).sqrt() / (1 - r), 1.0)


def _median(values: Tensor) -> Tensor:
    """The median over the first dimension; of an even number, the mean of the two in the middle."""
    ordered, n = values.sort(0).values, values.shape[0]
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _seed_scale(baseline: Tensor) -> Tensor:
    """The noise scale from the seeds, (J, N, n) -> (J, n)."""
    blocks, seeds, _ = baseline.shape
    deviations = baseline - baseline.mean(1, keepdim=True)
    variance = deviations.square().sum(1) / (seeds - 1)
    r = (deviations[1:] * deviations[:-1]).sum((0, 1)) / deviations.square().sum((0, 1))
    r = (r + (1 + 3 * r) / blocks).clamp(0, LARGEST_CORRELATION)
    near = [variance[max(0, j - SEED_NEIGHBOURS) : j + SEED_NEIGHBOURS + 1].mean(0) for j in range(blocks)]
    return ((1 + 1 / seeds) * torch.stack(near)).sqrt() * ((1 + r) / (1 - r)).sqrt()
