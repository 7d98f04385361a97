"""Whether a run diverges from a saved baseline: an alarm while it runs, and a verdict at its end.

**The idea.** Cut the baseline into J equal blocks of consumed data. The *gap* of a block is the candidate's mean loss minus the
baseline's. A gap matters when it exceeds a *margin*, and it is believed when it has exceeded the margin by more than the noise
for long enough. Evidence is added up block by block, and falls back to 0 when the gap does.

**The rule.** For block j with baseline loss b, gap g and noise scale s::

    d = max(0.01, 0.005 |b|)                              margin, nats
    z = min((g - d) / s, 4)
    S <- max(0, S) + lambda z - lambda^2 / 2              for each lambda in 1/2, 1, 2
    alarm when the largest S reaches h = ln(3 J / alpha)

Worked number: J = 100 and alpha = 0.01 give h = 10.3. A paired run whose gap is 0.05 at d = 0.01 and s = 0.005 has z = 4, so
lambda = 2 adds 6 a block and the alarm comes with the second one.

**Why it holds.** If z is conditionally 1-sub-Gaussian of mean at most 0, ``exp(lambda z - lambda^2 / 2)`` has mean at most 1:
it is an e-value. A CUSUM of such logarithms lies below the logarithm of the Shiryaev-Roberts sum, whose mean after J blocks is
at most J. So each S reaches h in any of J blocks with a probability of at most ``J exp(-h)``, and the three together with alpha
at most. The clip bounds what one block can add to 6, so one spike, whatever its size, is not an alarm; h is kept above that.
The clip only lowers z, so it costs power and never the guarantee.

**The noise scale.** Everything rests on s. It is never below d / 2.

- *Paired* (equal initial weights and data order): ``1.4826 median|difference of consecutive gaps| / sqrt(2)`` over the last 16
  past gaps. The median lets a spike or a jump pass, and the window follows noise that grows, as that of a pair does.
- *Unpaired, N >= 2 seeds*: ``sqrt((1 + 1/N) seed variance)``, averaged over 5 neighbouring blocks to each side, times
  ``sqrt((1 + r) / (1 - r))`` and times 1.25 (N >= 3) or 1.5 (N = 2). r is the autocorrelation of the seeds' deviations from
  their mean between neighbouring blocks. The root is the ratio of the long-run deviation of a first-order autoregression to its
  marginal one: a sum of correlated z grows like a sum of independent ones of that scale. Without it, healthy runs whose blocks
  have a correlation of 0.9 alarm in 30% of cases, with it in less than 1%; with r near 0 it changes nothing.
- *Unpaired, N = 1*: as for a pair, but consecutive differences hide what is correlated, so the scale is multiplied by
  ``sqrt(1 + r) / (1 - r)``, with r of the past gaps of the window plus one standard error, and by 2.25. The first 8 blocks
  count nothing, since their scale is not known. Seed spread cannot be seen in one run; this alarm needs large gaps.

Limits. Exactly *at* the margin the rate of alarms can exceed alpha, because block gaps are autocorrelated; ``--simulate`` shows
it. The scale of a pair has no term for correlation, as its noise is far below the margin: block gaps of 0.0006 or 0.003 nats
never alarm. A pair whose healthy gaps are as large as the margin itself and stay on one side for ten blocks (0.01 nats, with a
correlation of 0.9) is called diverged in a fifth of cases. Unpaired with one seed, only gaps of some ten margins are found.

**Alignment.** Blocks end where groups of the baseline's curve end, so thinning splits no group, and the bins of a paired
candidate hold the same steps. Where one side logged other steps than the other, the means of a block were taken at different
places: the baseline's is moved along its slope to the candidate's place, and s is at least the size of that move.

**The verdict** is an estimate over the last 20% of blocks with a 95% interval, from the larger of two errors: the spread of the
block gaps, corrected for autocorrelation, and the spread of the seeds.

Sources: Page 1954, "Continuous Inspection Schemes" (CUSUM); Shiryaev 1963 and Roberts 1966; Shin, Ramdas and Rinaldo 2022,
"E-detectors: a nonparametric framework for sequential change detection"; Marriott and Pope 1954 and Kendall 1954 on the bias of
an autocorrelation.
"""

from __future__ import annotations

import argparse
import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lightning_mp.numerics.baseline import Baseline, BaselineError, BaselineRun, Difference
from lightning_mp.numerics.curve import LARGEST_LOSS, LossCurve
from lightning_mp.numerics.estimate import (
    Estimate,
    autocorrelated_mean,
    difference_scale,
    hidden_by_differences,
    long_run_ratio,
    pooled_correlation,
    variance,
)

Axis = Literal["tokens", "samples", "steps"]
AXES: tuple[Axis, ...] = get_args(Axis)
Outcome = Literal["MATCHES", "DIVERGED", "INCONCLUSIVE", "NOT COMPARABLE", "BETTER"]

LAMBDAS = (0.5, 1.0, 2.0)
SINGLE_SEED_WARM_UP = 8  # blocks before the scale of an unpaired single seed is believed
SEED_NEIGHBOURS = 5  # blocks to each side over which the seed variance is averaged
SMALLEST_TAIL = 4  # blocks


def inflation(seeds: int) -> float:
    """What an unpaired noise scale is multiplied by, since it is itself estimated from so few seeds."""
    return {1: 2.25, 2: 1.5}.get(seeds, 1.25)


@dataclass(frozen=True)
class Rule:
    """The settings of the rule.

    Args:
        blocks: J, into how many blocks the baseline is cut; fewer if its curve has fewer points.
        alpha: the largest probability that a healthy run raises the alarm.
        margin: the smallest gap that matters, in the unit of the loss.
        relative_margin: the same as a fraction of the baseline's loss; the larger of both counts.
        window: past blocks from which the noise of a pair is estimated.
        clip: the largest z.
        tail_fraction: the part of the blocks, at the end, that the verdict estimates the gap from.
        min_coverage: the part of the baseline that a run must have covered for MATCHES or BETTER.

    Raises:
        ValueError: a value is outside its range.

    Example:
        >>> Rule(margin=0.02).margin
        0.02
    """

    blocks: int = 100
    alpha: float = 0.01
    margin: float = 0.01
    relative_margin: float = 0.005
    window: int = 16
    clip: float = 4.0
    tail_fraction: float = 0.2
    min_coverage: float = 0.9

    def __post_init__(self) -> None:
        _check(
            "blocks", self.blocks, isinstance(self.blocks, int) and 1 <= self.blocks <= 10_000, "a whole number from 1 to 10000"
        )
        _check("alpha", self.alpha, 0 < self.alpha < 1, "between 0 and 1")
        _check("margin", self.margin, 0 < self.margin < math.inf, "a finite number above 0")
        _check("relative_margin", self.relative_margin, 0 <= self.relative_margin < math.inf, "a finite number of at least 0")
        _check("window", self.window, isinstance(self.window, int) and self.window >= 3, "a whole number of at least 3")
        _check("clip", self.clip, 0 < self.clip < math.inf, "a finite number above 0")
        _check("tail_fraction", self.tail_fraction, 0 < self.tail_fraction <= 1, "above 0 and at most 1")
        _check("min_coverage", self.min_coverage, 0 <= self.min_coverage <= 1, "from 0 to 1")

    def threshold(self, blocks: int) -> float:
        """The evidence h that raises the alarm in a comparison of so many blocks.

        Kept above what a single block can add: with very few blocks the logarithm alone would let one spike through.
        """
        largest = max(weight * self.clip - weight * weight / 2 for weight in LAMBDAS)
        return max(math.log(len(LAMBDAS) * blocks / self.alpha), 1.05 * largest)


@dataclass(frozen=True)
class Block:
    """One closed block. Losses, gaps, margins and scales are in the unit of the loss.

    Attributes:
        index: its number, from 0. A block without a candidate loss, as of sparse logging, is left out.
        end: where it ends, on the axis of the comparison.
        candidate: the candidate's mean loss.
        baseline: the baseline's, over its seeds, or of the run that the candidate is paired with.
        gap: candidate - baseline.
        margin: the gap that matters here.
        scale: the noise scale s.
        evidence: the largest S after it, over the threshold; 1 or more is an alarm.
        band_low: the lowest of the seeds' means; None for one seed.
        band_high: the highest.
    """

    index: int
    end: float
    candidate: float
    baseline: float
    gap: float
    margin: float
    scale: float
    evidence: float
    band_low: float | None
    band_high: float | None


@dataclass(frozen=True)
class Alarm:
    """Where the evidence first reached its threshold.

    Attributes:
        block: the block's number, from 0.
        position: its end, on the axis of the comparison.
        step: the candidate's last optimizer step in it.
        gap: the gap of that block.
    """

    block: int
    position: float
    step: int | None
    gap: float


@dataclass(frozen=True)
class Verdict:
    """What the comparison says. Gaps and margins are in the unit of the loss.

    Attributes:
        status: MATCHES, DIVERGED, INCONCLUSIVE, NOT COMPARABLE or BETTER.
        gap: the mean gap of the last blocks; None if there is no block.
        interval: its two-sided 95% confidence interval; None with fewer than two blocks.
        margin: the margin there.
        smallest_visible_gap: the smallest true gap that would have been told from the margin with a probability of 0.8:
            margin + (t(0.975) + t(0.8)) * SE, with quantiles of Student's t.
        coverage: the part of the baseline's length that the run has covered.
        paired: whether initial weights and data order were the baseline's.
        seeds: how many runs the baseline holds.
        alarm: the online alarm, if it was raised.
        lag_explained: skipped steps times the baseline's fall of loss per step there: the gap that the lag alone explains.
        explanation: what happened, with numbers, and what to do.
        differences: what the candidate does otherwise than the baseline.
    """

    status: Outcome
    gap: float | None
    interval: tuple[float, float] | None
    margin: float | None
    smallest_visible_gap: float | None
    coverage: float
    paired: bool
    seeds: int
    alarm: Alarm | None
    lag_explained: float | None
    explanation: str
    differences: tuple[Difference, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain containers, a key for each attribute."""
        value = asdict(self)
        value["interval"] = None if self.interval is None else list(self.interval)
        value["differences"] = [asdict(difference) for difference in self.differences]
        return value


@dataclass
class _Bin:
    """What the candidate has shown in one block."""

    index: int
    total: float = 0.0
    count: int = 0
    position_total: float = 0.0
    end_step: int = 0
    end_position: float = 0.0


class DivergenceTest:
    """Compares the losses of a run with a baseline, step by step.

    Args:
        baseline: one or several seeds.
        axis: what is aligned: "tokens", "samples" or "steps". By default the first of these that all runs of the baseline and
            the candidate's first step know.
        paired_with: the number of the baseline's run, from 0, that shares the candidate's initial weights and data order; None
            if there is none.
        rule: the settings.

    Raises:
        BaselineError: the baseline cannot be compared with: it holds no loss, or its own loss was not finite.
        ValueError: ``axis`` or ``paired_with`` is not legal for this baseline.

    Attributes:
        blocks: the closed blocks, in order.
        alarm: the first alarm, or None.
        nonfinite_step: the first step whose loss was NaN or infinite, or None.

    Example:
        >>> from lightning_mp.numerics.curve import LossCurve
        >>> curve = LossCurve()
        >>> for step in range(1, 201):
        ...     curve.add(step, 4.0 - step / 100)
        >>> test = DivergenceTest(Baseline((BaselineRun(curve),), "fp32.json"), paired_with=0)
        >>> for step in range(1, 201):
        ...     block = test.add(step, 4.0 - step / 100 + (0.1 if step > 100 else 0.0))
        >>> test.alarm.step, test.verdict().status
        (104, 'DIVERGED')
    """

    def __init__(
        self, baseline: Baseline, *, axis: Axis | None = None, paired_with: int | None = None, rule: Rule | None = None
    ) -> None:
        self.baseline = baseline
        self.rule = rule or Rule()
        self.nonfinite_step: int | None = None
        self.last_step = 0
        self.position = 0.0
        self.blocks: list[Block] = []
        self.alarm: Alarm | None = None
        _refuse_unusable(baseline)
        self._known_axes = [name for name in AXES if all(_length(run.curve, name) for run in baseline.runs)]
        if axis is not None and axis not in self._known_axes:
            raise ValueError(f"axis is {axis!r}; this baseline ({baseline.source}) knows {', '.join(self._known_axes)}")
        self._axis_is_open = axis is None
        self._check_pairing(paired_with)
        self.paired_with = paired_with
        self._closed: list[_Bin] = []
        self._bin = _Bin(0)
        self._sums = [0.0] * len(LAMBDAS)
        self._use_axis(axis or self._known_axes[0])

    @property
    def threshold(self) -> float:
        """The evidence h that raises the alarm."""
        return self.rule.threshold(len(self._grid.edges))

    @property
    def evidence(self) -> float:
        """The largest S after the last block, over the threshold; 0 before the first."""
        return self.blocks[-1].evidence if self.blocks else 0.0

    @property
    def coverage(self) -> float:
        """The part of the baseline's length that the candidate has covered, at most 1."""
        return min(1.0, self.position / self._grid.edges[-1])

    @property
    def edges(self) -> list[float]:
        """Where the blocks end, on the axis of the comparison."""
        return list(self._grid.edges)

    def add(self, step: int, loss: float | None, samples: int | None = None, tokens: int | None = None) -> Block | None:
        """Take in one optimizer step.

        A block closes with the step that reaches its end, or with the first step beyond it. A step belongs to the block in
        which its end lies. What lies beyond the baseline's end is ignored.

        Args:
            step: the optimizer step, counted from 1.
            loss: the true loss; None if it is not known. A loss that is not finite is a hard stop: see ``nonfinite_step``.
            samples: samples consumed up to and including the step, over all ranks.
            tokens: tokens, likewise.

        Returns:
            The block that was closed; the later one if the step closed two; None if it closed none.

        Raises:
            ValueError: steps or totals do not increase, or the total of the axis is not known.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} does not come after step {self.last_step}; steps count from 1 and must increase")
        if self._axis_is_open:
            self._settle_axis(samples, tokens)
        value = step if self.axis == "steps" else samples if self.axis == "samples" else tokens
        if value is None:
            raise ValueError(f"the {self.axis} consumed are not known at step {step}; compare with axis='steps'")
        if value < self.position:
            raise ValueError(f"{self.axis} at step {step} are {value}, after {self.position:.0f}; they cannot shrink")
        self.last_step, self.position = step, float(value)
        closed = len(self.blocks)
        edges = self._grid.edges
        while self._bin.index < len(edges) and value > edges[self._bin.index]:
            self._close()
        finite = loss is not None and -LARGEST_LOSS <= loss <= LARGEST_LOSS
        if loss is not None and not finite and self.nonfinite_step is None:
            self.nonfinite_step = step
        if self._bin.index < len(edges):
            present = self._bin
            present.end_step, present.end_position = step, float(value)
            if loss is not None and finite:
                present.total += loss
                present.count += 1
                present.position_total += value
            if value >= edges[present.index]:
                self._close()
        return self.blocks[-1] if len(self.blocks) > closed else None

    def set_pairing(self, paired_with: int | None) -> None:
        """Say which run of the baseline the candidate is paired with, and judge all closed blocks again.

        Fingerprints complete only as a run goes. Costs one pass over the closed blocks; an alarm may move, come or go.

        Raises:
            ValueError: the baseline has no such run.
        """
        self._check_pairing(paired_with)
        if paired_with != self.paired_with:
            self.paired_with = paired_with
            self._judge_again()

    def drop_after(self, step: int) -> None:
        """Forget what came after an optimizer step, as a resume from that step does.

        Exact up to the last block that ended by then; the part of a block that holds later steps too is forgotten whole.
        """
        if step >= self.last_step:
            return
        bins = [present for present in (*self._closed, self._bin) if 0 < present.end_step <= step]
        last = bins[-1] if bins else None
        self.last_step = last.end_step if last else 0
        self.position = last.end_position if last else 0.0
        if last is None:
            self._bin = _Bin(0)
        elif last.end_position < self._grid.edges[last.index]:
            self._bin = bins.pop()  # a step that is now forgotten had closed it
        else:
            self._bin = _Bin(last.index + 1)
        self._closed = bins
        if self.nonfinite_step is not None and self.nonfinite_step > step:
            self.nonfinite_step = None
        self._judge_again()

    def state_dict(self) -> dict[str, Any]:
        """All that has been seen, as plain numbers, strings and lists.

        Keys: ``axis``, ``edges``, ``paired_with``, ``nonfinite_step``, ``last_step``, ``position``, and ``bins``: the closed
        ones and the open one, each with ``index``, ``total``, ``count``, ``position_total``, ``end_step``, ``end_position``.
        """
        return {
            "axis": self.axis if not self._axis_is_open else None,
            "edges": list(self._grid.edges),
            "paired_with": self.paired_with,
            "nonfinite_step": self.nonfinite_step,
            "last_step": self.last_step,
            "position": self.position,
            "bins": [asdict(present) for present in (*self._closed, self._bin)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, exactly. Blocks, evidence and alarm follow from what had been seen.

        Raises:
            ValueError: the state belongs to a comparison with another baseline or another number of blocks.
        """
        axis = state["axis"]
        if axis is not None and axis not in self._known_axes:
            raise ValueError(f"the saved comparison is on {axis!r}, which the baseline {self.baseline.source} does not know")
        self._axis_is_open = axis is None
        self._use_axis(axis or self._known_axes[0])
        if state["edges"] != self._grid.edges:
            raise ValueError(
                f"the saved comparison has {len(state['edges'])} blocks up to {state['edges'][-1]:.0f} {self.axis}, this one "
                f"{len(self._grid.edges)} up to {self._grid.edges[-1]:.0f}: it belongs to another baseline than "
                f"{self.baseline.source}, or to another Rule.blocks. Resume with the baseline that the run started with."
            )
        self._check_pairing(state["paired_with"])
        self.paired_with = state["paired_with"]
        self.nonfinite_step = state["nonfinite_step"]
        self.last_step, self.position = state["last_step"], state["position"]
        *self._closed, self._bin = (_Bin(**present) for present in state["bins"])
        self._judge_again()

    def verdict(self, *, differences: Sequence[Difference] = (), force: bool = False, skipped_steps: int = 0) -> Verdict:
        """Say what the comparison shows so far.

        Args:
            differences: in what the candidate differs from the baseline.
            force: judge although a difference decides against it.
            skipped_steps: optimizer steps that were dropped because of an overflow, for ``lag_explained``.
        """
        tail = self._tail()
        estimate = self._estimate(tail)
        margin = statistics.fmean(block.margin for block in tail) if tail else None
        status, sentences = self._judgement(tail, estimate, margin, list(differences), force)
        lag = self._lag(tail, skipped_steps)
        if lag is not None and skipped_steps:
            sentences.append(
                f"Skipped steps ({skipped_steps}) put the run behind; at the baseline's slope there that is {lag:.4f} of loss."
            )
        beside = [difference.text for difference in differences if not difference.decides or force]
        if beside and status in ("DIVERGED", "INCONCLUSIVE"):
            sentences.append(f"What differs: {'; '.join(beside)}.")
        if self.position > self._grid.edges[-1]:
            sentences.append("What lies beyond the baseline's end was ignored.")
        half = estimate.half_width if estimate else None
        return Verdict(
            status=status,
            gap=statistics.fmean(block.gap for block in tail) if tail else None,
            interval=(estimate.mean - half, estimate.mean + half) if estimate and half is not None else None,
            margin=margin,
            smallest_visible_gap=margin + estimate.visible if estimate and margin is not None else None,
            coverage=self.coverage,
            paired=self.paired_with is not None,
            seeds=len(self.baseline.runs),
            alarm=self.alarm,
            lag_explained=lag,
            explanation=" ".join(sentences),
            differences=tuple(differences),
        )

    def _use_axis(self, axis: Axis) -> None:
        self.axis: Axis = axis
        self._grid = _Grid(self.baseline, axis, self.rule.blocks)

    def _settle_axis(self, samples: int | None, tokens: int | None) -> None:
        """The candidate's first step shows which totals it knows; the axis stays from there on."""
        have = {"tokens": tokens is not None, "samples": samples is not None, "steps": True}
        axis: Axis = next((name for name in self._known_axes if have[name]), "steps")
        if axis != self.axis:
            self._use_axis(axis)
        self._axis_is_open = False

    def _check_pairing(self, paired_with: int | None) -> None:
        if paired_with is not None and not 0 <= paired_with < len(self.baseline.runs):
            raise ValueError(f"paired_with is {paired_with}; the baseline has runs 0 to {len(self.baseline.runs) - 1}")

    def _close(self) -> None:
        closed, self._bin = self._bin, _Bin(self._bin.index + 1)
        if closed.end_step:
            self._closed.append(closed)
            self._judge(closed)

    def _judge_again(self) -> None:
        self.blocks, self.alarm, self._sums = [], None, [0.0] * len(LAMBDAS)
        for closed in self._closed:
            self._judge(closed)

    def _judge(self, closed: _Bin) -> None:
        if not closed.count:
            return
        seeds = self._grid.seeds_at(closed.index, closed.position_total / closed.count)
        mine = seeds if self.paired_with is None else seeds[self.paired_with : self.paired_with + 1]
        known = [mean for mean, _ in (seed for seed in mine if seed is not None)]
        if not known:
            return
        moved = max(abs(move) for _, move in (seed for seed in mine if seed is not None))
        candidate, baseline = closed.total / closed.count, statistics.fmean(known)
        gap = candidate - baseline
        margin = max(self.rule.margin, self.rule.relative_margin * abs(baseline))
        scale = self._scale(closed.index, margin, moved)
        self._count_evidence((gap - margin) / scale)
        band = [mean for mean, _ in (seed for seed in seeds if seed is not None)]
        several = len(self.baseline.runs) > 1
        block = Block(
            index=closed.index,
            end=self._grid.edges[closed.index],
            candidate=candidate,
            baseline=baseline,
            gap=gap,
            margin=margin,
            scale=scale,
            evidence=max(0.0, *self._sums) / self.threshold,
            band_low=min(band) if several else None,
            band_high=max(band) if several else None,
        )
        self.blocks.append(block)
        if block.evidence >= 1 and self.alarm is None:
            self.alarm = Alarm(block.index, block.end, closed.end_step, gap)

    def _count_evidence(self, excess: float) -> None:
        if self.paired_with is None and len(self.baseline.runs) == 1 and len(self.blocks) < SINGLE_SEED_WARM_UP:
            return
        z = min(excess, self.rule.clip)
        self._sums = [max(0.0, total) + a * z - a * a / 2 for total, a in zip(self._sums, LAMBDAS, strict=True)]

    def _scale(self, index: int, margin: float, moved: float) -> float:
        gaps = [block.gap for block in self.blocks[-self.rule.window :]]
        if self.paired_with is not None:
            return max(difference_scale(gaps), margin / 2, moved)
        seeds = len(self.baseline.runs)
        noise = difference_scale(gaps) * hidden_by_differences(gaps) if seeds == 1 else self._grid.seed_scale[index]
        return max(noise, margin / 2, moved) * inflation(seeds)

    def _tail(self) -> list[Block]:
        return self.blocks[-max(SMALLEST_TAIL, round(self.rule.tail_fraction * len(self.blocks))) :]

    def _estimate(self, tail: Sequence[Block]) -> Estimate | None:
        """The mean gap of the tail with the error that gives the wider interval."""
        if len(tail) < 2:
            return None
        estimate = autocorrelated_mean([block.gap for block in tail])
        seeds = len(self.baseline.runs)
        if self.paired_with is not None or seeds == 1:
            return estimate
        spread = self._grid.seed_spread([block.index for block in tail])
        if spread is None:
            return estimate
        by_seeds = Estimate(estimate.mean, spread * math.sqrt(1 + 1 / seeds), seeds - 1)
        return max(estimate, by_seeds, key=lambda one: one.half_width)

    def _lag(self, tail: Sequence[Block], skipped_steps: int) -> float | None:
        if len(tail) < 2:
            return None
        curve = self.baseline.runs[self.paired_with or 0].curve
        steps = (tail[-1].end - tail[0].end) * curve.last_step / self._grid.length_of(self.paired_with or 0)
        return skipped_steps * max(0.0, (tail[0].baseline - tail[-1].baseline) / steps)

    def _judgement(
        self,
        tail: Sequence[Block],
        estimate: Estimate | None,
        margin: float | None,
        differences: Sequence[Difference],
        force: bool,
    ) -> tuple[Outcome, list[str]]:
        """The status, and the sentences that explain it."""
        deciding = [difference.text for difference in differences if difference.decides]
        if self.nonfinite_step is not None:
            also = f" It also differs from the baseline: {'; '.join(deciding)}." if deciding else ""
            return "DIVERGED", [
                f"The loss was not finite at step {self.nonfinite_step}.{also}",
                "Look for an overflow there: lower the learning rate, clip gradients, or use a precision with a wider range.",
            ]
        if deciding and not force:
            return "NOT COMPARABLE", [
                f"The run is not the baseline's: {'; '.join(deciding)}.",
                "Give both runs the same settings, record a new baseline, or force the comparison.",
            ]
        if estimate is None or margin is None:
            return "INCONCLUSIVE", [self._too_little(len(tail))]
        low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
        found = (
            f"Over the last {len(tail)} blocks the loss is {_signed(estimate.mean)} from the baseline's, "
            f"95% interval {_signed(low)} to {_signed(high)}; the margin is {margin:.4f}."
        )
        if self.alarm is not None and high >= margin:
            return "DIVERGED", [self._alarm_sentence(), found, self._advice()]
        recovered = [f"{self._alarm_sentence()} It has recovered since."] if self.alarm is not None else []
        if self.paired_with is None and len(self.baseline.runs) == 1:
            return "INCONCLUSIVE", [
                *recovered,
                found,
                "The run is not paired and the baseline has one seed, so the spread between seeds is not known.",
                "Start from the baseline's weights and data order, or record three seeds.",
            ]
        if low > margin:
            return "DIVERGED", [found, self._advice()]
        status: Outcome = "BETTER" if high < -margin else "MATCHES" if high < margin else "INCONCLUSIVE"
        if status == "INCONCLUSIVE":
            return status, [*recovered, found, self._could_have_seen(margin, estimate)]
        unfinished = self._unfinished()
        if unfinished and not force:
            return "INCONCLUSIVE", [*recovered, found, unfinished, "Record it to its end, or force the comparison."]
        if self.coverage < self.rule.min_coverage:
            covered = f"The run covers {self.coverage:.0%} of the baseline; a match needs {self.rule.min_coverage:.0%}."
            return "INCONCLUSIVE", [*recovered, found, covered, "Let it run on."]
        if status == "BETTER":
            return status, [
                *recovered,
                found,
                "That is better than the baseline by more than the margin; check that it is the same task.",
            ]
        return status, [*recovered, found, "No action is needed."]

    def _unfinished(self) -> str | None:
        """A sentence if the baseline, or the run of it that the candidate is paired with, did not come to its planned end."""
        runs = self.baseline.runs if self.paired_with is None else self.baseline.runs[self.paired_with :][:1]
        for run in runs:
            if run.status != "finished":
                planned = run.settings.get("max_steps")
                of = f" of {planned:,}" if isinstance(planned, int) and planned > 0 else ""
                return f"The baseline is not a whole run: it ended at step {run.curve.last_step:,}{of}."
        return None

    def _too_little(self, blocks: int) -> str:
        if not self.last_step:
            return "No step was seen. Train with the monitor attached."
        return (
            f"Only {blocks} of {len(self._grid.edges)} blocks hold a loss of both runs, after {self.position:.0f} of "
            f"{self._grid.edges[-1]:.0f} {self.axis}; two are needed. Train longer, or log the loss more often."
        )

    def _alarm_sentence(self) -> str:
        assert self.alarm is not None
        return (
            f"The alarm was raised at step {self.alarm.step} ({self.alarm.position / self._grid.edges[-1]:.0%} of "
            f"the baseline), where the loss was {_signed(self.alarm.gap)} from the baseline's."
        )

    def _advice(self) -> str:
        where = "where the gap begins to grow" if self.alarm is None else f"just before step {self.alarm.step}"
        return (
            f"Compare the runs {where}: gradients, stalled parameters, data. If only the precision differs, keep fp32 masters,"
            " keep more modules in fp32, or lower the learning rate."
        )

    def _could_have_seen(self, margin: float, estimate: Estimate) -> str:
        visible = f"Only a gap of {margin + estimate.visible:.4f} or more would have been seen."
        if self.paired_with is not None:
            return f"{visible} A longer run or a larger batch has less noise."
        if len(self.baseline.runs) < 3:
            few = "Two seeds hardly show their spread: record three"
            return f"{visible} {few}, or start from the baseline's weights and data order."
        return f"{visible} Record more seeds, or start from the baseline's weights and data order."


class _Grid:
    """The baseline cut into blocks on one axis."""

    def __init__(self, baseline: Baseline, axis: Axis, blocks: int) -> None:
        self._ends = [[float(end) for end in getattr(run.curve, axis)] for run in baseline.runs]
        self.edges = _block_edges(self._ends, blocks)
        binned = [self._binned(run, ends) for run, ends in zip(baseline.runs, self._ends, strict=True)]
        self._means: list[list[float | None]] = [[cell and cell[0] for cell in row] for row in binned]
        self._places: list[list[float | None]] = [[cell and cell[1] for cell in row] for row in binned]
        self._slopes = self._local_slopes()
        self.seed_scale = self._seed_scales()

    def length_of(self, run: int) -> float:
        return self._ends[run][-1]

    def seeds_at(self, index: int, place: float) -> list[tuple[float, float] | None]:
        """Each run's mean in a block as it would be at a place, and how far it was moved for that."""
        found: list[tuple[float, float] | None] = []
        for means, places in zip(self._means, self._places, strict=True):
            mean, own = means[index], places[index]
            if mean is None or own is None:
                found.append(None)
                continue
            move = self._slopes[index] * (place - own)
            found.append((mean + move, move))
        return found

    def seed_spread(self, indices: Sequence[int]) -> float | None:
        """The standard deviation over the runs of their mean over some blocks that all of them know."""
        shared = [index for index in indices if all(means[index] is not None for means in self._means)]
        if not shared:
            return None
        return math.sqrt(variance([statistics.fmean(means[index] or 0.0 for index in shared) for means in self._means]))

    def _binned(self, run: BaselineRun, ends: Sequence[float]) -> list[tuple[float, float] | None]:
        """The run's mean loss in each block, and where on the axis it was taken."""
        curve, size = run.curve, len(self.edges)
        totals, places, counts = [0.0] * size, [0.0] * size, [0] * size
        before = 0
        start = 0.0
        for step, end, loss, count, mean_step in zip(
            curve.steps, ends, curve.losses, curve.counts, curve.mean_steps, strict=True
        ):
            index = bisect.bisect_left(self.edges, end)
            if index < size and loss is not None and mean_step is not None:
                totals[index] += loss * count
                counts[index] += count
                places[index] += count * (end - (step - mean_step) * (end - start) / (step - before))
            before = step
            start = end
        return [(t / n, p / n) if n else None for t, p, n in zip(totals, places, counts, strict=True)]

    def _local_slopes(self) -> list[float]:
        """The baseline's fall of loss along the axis, in each block, from its neighbours."""
        knots: list[tuple[int, float, float]] = []
        for index in range(len(self.edges)):
            cells = [(m[index], p[index]) for m, p in zip(self._means, self._places, strict=True)]
            known = [(mean, place) for mean, place in cells if mean is not None and place is not None]
            if known:
                means, places = zip(*known, strict=True)
                knots.append((index, statistics.fmean(means), statistics.fmean(places)))
        slopes = [0.0] * len(self.edges)
        for number, (index, _, _) in enumerate(knots):
            _, high, left = knots[max(0, number - 1)]
            _, low, right = knots[min(len(knots) - 1, number + 1)]
            slopes[index] = (low - high) / (right - left) if right > left else 0.0
        return slopes

    def _seed_scales(self) -> list[float]:
        """sqrt((1 + 1/N) seed variance), smoothed, times the ratio of long-run to marginal deviation. 0 where unknown."""
        seeds = len(self._means)
        if seeds < 2:
            return [0.0] * len(self.edges)
        columns = [[mean for mean in column if mean is not None] for column in zip(*self._means, strict=True)]
        variances = [variance(column) if len(column) == seeds else None for column in columns]
        long_run = long_run_ratio(pooled_correlation(columns, seeds))
        scales = []
        for index in range(len(columns)):
            near = [v for v in variances[max(0, index - SEED_NEIGHBOURS) : index + SEED_NEIGHBOURS + 1] if v is not None]
            scales.append(math.sqrt((1 + 1 / seeds) * statistics.fmean(near)) * long_run if near else 0.0)
        return scales


def _block_edges(ends: Sequence[Sequence[float]], blocks: int) -> list[float]:
    """The group ends of the coarsest run that lie nearest to equal parts of the shortest run's length."""
    length = min(run[-1] for run in ends)
    coarsest = [end for end in min(ends, key=lambda run: len(run) / run[-1]) if 0 < end <= length] or [length]
    count = min(blocks, len(coarsest))
    edges: list[float] = []
    for number in range(1, count + 1):
        target = length * number / count
        at = bisect.bisect_left(coarsest, target)
        nearest = min(coarsest[max(0, at - 1) : at + 1], key=lambda end: abs(end - target))
        if not edges or nearest > edges[-1]:
            edges.append(nearest)
    return edges


def _length(curve: LossCurve, axis: Axis) -> int:
    """How much a curve covers of an axis; 0 where it is not known. Batches may be empty."""
    ends = getattr(curve, axis)
    return ends[-1] if ends else 0


def _refuse_unusable(baseline: Baseline) -> None:
    for number, run in enumerate(baseline.runs, start=1):
        which = f"run {number} of the baseline" if len(baseline.runs) > 1 else "the baseline"
        if run.curve.first_nonfinite_step is not None:
            raise BaselineError(
                f"{baseline.source}: {which} itself diverged: its loss was not finite at step "
                f"{run.curve.first_nonfinite_step}. Record it again with a lower learning rate."
            )
        if not any(run.curve.counts):
            raise BaselineError(f"{baseline.source}: {which} holds no loss. Record it again, for longer.")
    if not baseline.runs:
        raise BaselineError(f"{baseline.source}: the baseline holds no runs. Record one with BaselineRecorder.")


def _check(name: str, value: object, legal: bool, range_: str) -> None:
    if isinstance(value, bool) or not legal:
        raise ValueError(f"{name} is {value!r}; it must be {range_}")


def _signed(gap: float) -> str:
    text = f"{gap:+.4f}"
    return text if float(text) else "0.0000"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how often the rule alarms, and how late, in simulated runs."""
    parser = argparse.ArgumentParser(prog="python -m lightning_mp.numerics.divergence", description=main.__doc__)
    parser.add_argument("--simulate", action="store_true", required=True, help="simulate runs and print the table")
    parser.add_argument("--runs", type=int, default=2000, help="runs per row of the table (default: 2000)")
    options = parser.parse_args(arguments)
    from lightning_mp.numerics.divergence_simulation import print_table

    print_table(options.runs)


if __name__ == "__main__":
    main()
