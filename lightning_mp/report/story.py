"""What the report page tells: the runs of one comparison, in plain numbers.

:mod:`lightning_mp.report.saved` fills this in, and :mod:`lightning_mp.report.page` only reads it. Everything but a run's name
and precision may be unknown. What is unknown is None or empty, is left out of the page, and the page says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_mp.numerics.divergence import Block, Verdict

#: How a run ended.
STATUSES = ("ok", "failed", "non-finite", "interrupted")
#: The precision of a run that does not say it.
UNKNOWN_PRECISION = "unknown"
#: What losses are aligned on.
AXES = ("tokens", "samples", "steps")
#: The parts of memory, in the order in which they are stacked.
MEMORY_PARTS = ("weights", "masters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Series:
    """Points of a curve, in the order of ``x``.

    Attributes:
        x: positions.
        y: values; NaN where there is a gap.

    Raises:
        ValueError: ``x`` and ``y`` differ in length.

    Example:
        >>> Series([1, 2, 3], [5.1, float("nan"), 4.8]).x[-1]
        3
    """

    x: Sequence[float]
    y: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"a series has as many x as y, not {len(self.x)} and {len(self.y)}")


@dataclass(frozen=True)
class Exponents:
    """How the magnitudes of gradient elements are spread over the powers of two, without the loss scale.

    Attributes:
        edges: log2 of the bins' edges, one more than there are counts.
        counts: elements from ``2^edges[i]`` up to ``2^edges[i + 1]``.
        flushed: elements that the format has flushed to zero; they belong to the left of the histogram.
        scale: the loss scale, 1 for none. In backward the elements lie ``log2(scale)`` further right.

    Raises:
        ValueError: the numbers of edges and counts do not fit, or the scale is not positive.

    Example:
        >>> Exponents(edges=[-3, -2, -1], counts=[10, 4], flushed=0, scale=1).counts
        [10, 4]
    """

    edges: Sequence[float]
    counts: Sequence[float]
    flushed: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} bins have {len(self.counts) + 1} edges, not {len(self.edges)}")
        if not self.scale > 0:
            raise ValueError(f"a loss scale is a positive number, not {self.scale}")


@dataclass(frozen=True)
class RunStory:
    """One run: how it ended, what it cost, and how it was judged.

    Attributes:
        name: what the run is called.
        precision: the precision that it trained in, such as ``bf16-master``. It decides the run's colour, and which format's
            limits its gradients are shown against.
        status: one of :data:`STATUSES`.
        error: why the status is not ``ok``.
        loss: true loss of each optimizer step, over the story's axis.
        tail_loss: mean loss at the end of the run.
        step_times_ms: time of each measured step.
        step_time_ms: median of these.
        tokens_per_s: over the whole run.
        tokens_per_s_series: the same as the run went on, over the story's axis.
        memory_gib: GiB by part; the keys are of :data:`MEMORY_PARTS`, others come after them.
        bytes_per_parameter: bytes per parameter, by part.
        peak_gib: the most memory at any time, in GiB.
        peak_label: what that peak is of: the device's allocator, or the process.
        loss_scale: log2 of the scale that made the gradients, over optimizer steps; from one point to the next it stays
            the same. None without loss scaling.
        skipped_steps: numbers of the steps that were skipped because of an overflow, as far as they are known.
        skipped_count: how many were skipped.
        exponents: the range of gradients in one step.
        updates_lost_fraction: weight updates that the parameters' own format would have lost, 0 to 1.
        verdict: the run against the baseline; None if it was not judged.
        blocks: the blocks that the verdict rests on.
        what: settings, by name, shown under what was run.
        device: the name of the device.
        versions: version by package.
        notes: what a reader should know, one sentence each.

    Raises:
        ValueError: the status is not one of :data:`STATUSES`.

    Example:
        >>> RunStory("bf16-master", "bf16-master", peak_gib=1.25, tokens_per_s=52_000).status
        'ok'
    """

    name: str
    precision: str
    status: str = "ok"
    error: str | None = None
    loss: Series | None = None
    tail_loss: float | None = None
    step_times_ms: Sequence[float] = ()
    step_time_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_series: Series | None = None
    memory_gib: Mapping[str, float] = field(default_factory=dict)
    bytes_per_parameter: Mapping[str, float] | None = None
    peak_gib: float | None = None
    peak_label: str = "peak memory"
    loss_scale: Series | None = None
    skipped_steps: Sequence[int] | None = None
    skipped_count: int | None = None
    exponents: Exponents | None = None
    updates_lost_fraction: float | None = None
    verdict: Verdict | None = None
    blocks: Sequence[Block] = ()
    what: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"a run's status is one of {', '.join(STATUSES)}, not {self.status!r}")


@dataclass(frozen=True)
class Story:
    """A comparison: several runs and what they are compared with.

    Attributes:
        title: the page's heading.
        created: when, as it is to be shown.
        command: the command that repeats it; empty if it is not known.
        axis: one of :data:`AXES`; what the losses are aligned on.
        reference: name of the run that ratios refer to, normally the fp32 one; None if there is none among the runs.
        runs: the runs, in the order in which they are shown.
        baseline_curves: losses of the baseline's seeds, over ``axis``.
        judged_by: what the verdicts are against, if that is not the reference with its seeds; such as the file of a baseline.

    Raises:
        ValueError: the axis is not one of :data:`AXES`, or the reference is not a run.

    Example:
        >>> runs = [RunStory("32-true", "32-true", step_time_ms=40.0), RunStory("bf16", "bf16-master", step_time_ms=30.0)]
        >>> story = Story("Two precisions", created="2026-11-29", command="", axis="tokens", reference="32-true", runs=runs)
        >>> [run.name for run in story.candidates]
        ['bf16']
    """

    title: str
    created: str
    command: str
    axis: str
    reference: str | None
    runs: Sequence[RunStory]
    baseline_curves: Sequence[Series] = ()
    judged_by: str | None = None

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"the axis is one of {', '.join(AXES)}, not {self.axis!r}")
        if self.reference is not None and self.reference not in [run.name for run in self.runs]:
            names = ", ".join(run.name for run in self.runs) or "none"
            raise ValueError(f"the reference {self.reference!r} is not among the runs ({names}); name one of them, or None")

    @property
    def reference_run(self) -> RunStory | None:
        """The run that ratios refer to."""
        return next((run for run in self.runs if run.name == self.reference), None)

    @property
    def candidates(self) -> list[RunStory]:
        """The runs but the reference."""
        reference = self.reference_run
        return [run for run in self.runs if run is not reference]
