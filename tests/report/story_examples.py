"""Stories for the tests of the report page: made-up runs that look like real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_mp.numerics.divergence import Alarm, Block, Verdict
from lightning_mp.report.story import Exponents, RunStory, Series, Story

STEPS, TOKENS_PER_STEP, BLOCKS = 1500, 1536, 100
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&amp; $\\frac{1}{2}$"
LONG = "an-experiment-with-a-name-that-nobody-would-type-twice/and-a-folder/" + "x" * 120 + "/seed-17"
VERSIONS = {"lightning_mp": "0.1.0", "torch": "2.13.0+cpu", "lightning": "2.6.6", "python": "3.11.9"}
WHAT = {"model": "ByteGPT, 3,306,240 parameters", "batch": "12 x 128 tokens", "optimizer": "AdamW, lr 1e-4", "seed": "0"}


def curve(steps: int = STEPS, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    t = np.arange(1, steps + 1)
    return 2.5 + 3.0 * np.exp(-t / (steps / 12)) + 0.45 * np.exp(-t / (steps / 2)) + noise


def tokens(steps: int = STEPS) -> list[float]:
    return [float(step * TOKENS_PER_STEP) for step in range(1, steps + 1)]


def series(losses: Sequence[float]) -> Series:
    return Series(tokens(len(losses)), [float(loss) for loss in losses])


def blocks(candidate: np.ndarray, baseline: np.ndarray, band: float | None = None) -> list[Block]:
    found, each = [], len(baseline) // BLOCKS
    for j in range(min(BLOCKS, len(candidate) // each)):
        part = slice(j * each, (j + 1) * each)
        mine, base = float(candidate[part].mean()), float(baseline[part].mean())
        margin = max(0.01, 0.005 * base)
        low, high = (base - band, base + band) if band else (None, None)
        end = float((j + 1) * each * TOKENS_PER_STEP)
        found.append(Block(j, end, mine, base, mine - base, margin, margin / 2, 0.0, low, high))
    return found


def verdict(status: str, of: Sequence[Block], explanation: str, alarm_at: int | None = None) -> Verdict:
    gap = float(np.mean([block.gap for block in of[-20:]]))
    alarm = None
    if alarm_at is not None:
        block = of[alarm_at]
        alarm = Alarm(block.index, block.end, int(block.end // TOKENS_PER_STEP), block.gap)
    half = 0.0004 if abs(gap) < 0.01 else 0.0041
    return Verdict(
        status=status,
        gap=gap,
        interval=(gap - half, gap + half),
        margin=of[-1].margin,
        smallest_visible_gap=of[-1].margin + 2 * half,
        coverage=len(of) / BLOCKS,
        paired=True,
        seeds=1,
        alarm=alarm,
        lag_explained=None,
        explanation=explanation,
        differences=(),
    )


def exponents(centre: float, scale: float = 1.0, flushed: float = 0.0, width: float = 3.5) -> Exponents:
    edges = [float(edge) for edge in range(-149, 129)]
    counts = [3.3e6 * math.exp(-(((edge + 0.5 - centre) / width) ** 2) / 2) for edge in edges[:-1]]
    return Exponents(edges, [round(count) for count in counts], flushed, scale)


def run(name: str, precision: str, *, gap: float = 0.0, speed: float = 1.0, seed: int = 1, **fields: object) -> RunStory:
    """A run whose loss leaves the baseline by ``gap``, as steps go on."""
    base = curve()
    rng = np.random.default_rng(seed)
    losses = (
        base + gap * (1 - np.exp(-np.arange(STEPS) / (0.3 * STEPS))) + rng.normal(0, 0.001, STEPS) * (precision != "32-true")
    )
    masters, weights = (2.0, 2.0) if "master" in precision else (0.0, 2.0 if precision.endswith("6-true") else 4.0)
    optimizer = 4.0 if precision.endswith("6-true") else 8.0
    per_parameter = {"weights": weights, "masters": masters, "gradients": weights, "optimizer": optimizer}
    gib = {part: size * 3.3e6 / 2**30 for part, size in per_parameter.items()}
    times = 220 / speed * np.exp(rng.normal(0, 0.04, STEPS)) + (rng.random(STEPS) < 0.01) * 90
    per_s = [TOKENS_PER_STEP / t * 1000 for t in np.convolve(times, np.ones(50) / 50, "valid")[::10]]
    story = RunStory(
        name,
        precision,
        loss=series(losses),
        tail_loss=float(losses[-300:].mean()),
        step_times_ms=[float(t) for t in times],
        step_time_ms=float(np.median(times)),
        tokens_per_s=float(TOKENS_PER_STEP * STEPS / times.sum() * 1000),
        tokens_per_s_series=Series(tokens()[49::10], [float(v) for v in per_s]),
        memory_gib={**gib, "activations": 0.021 if precision == "32-true" else 0.012, "buffers": 0.0002},
        bytes_per_parameter=per_parameter,
        peak_gib=0.09 * (0.6 + 0.4 * sum(per_parameter.values()) / 16),
        peak_label="peak memory",
        what={**WHAT, "precision": precision},
        device="AMD EPYC 9R14, 2 threads",
        versions=VERSIONS,
        exponents=exponents(-19),
        updates_lost_fraction=0.0 if precision in ("32-true", "bf16-mixed", "16-mixed") else 0.62,
    )
    return replace(story, **fields)


def judged(story: RunStory, status: str, explanation: str, alarm_at: int | None = None, band: float | None = None) -> RunStory:
    assert story.loss is not None
    found = blocks(np.array(story.loss.y), curve(), band)
    return replace(story, blocks=found, verdict=verdict(status, found, explanation, alarm_at))


def scale_of(steps: int, overflows: Sequence[int]) -> Series:
    value, values = 16.0, []
    for step in range(1, steps + 1):
        values.append(value)
        if step in overflows:
            value -= 1
        elif step % 400 == 0:
            value += 1
    return Series([float(step) for step in range(1, steps + 1)], values)


MATCHES = (
    "The loss at the end is within 0.0004 of the baseline, which is less than the margin of 0.0128. The runs share initial "
    "weights and data order, so a gap of 0.0136 would have been seen."
)
DIVERGED = (
    "The loss at the end is 0.1902 above the baseline, 15 times the margin. The gap began to grow at once. Most weight updates "
    "round to nothing in bf16: use bf16-master, which keeps them."
)


def story() -> Story:
    """What a comparison gives: the reference, a run that diverged, and three that match, two of them in fp16."""
    reference = run("32-true", "32-true")
    mixed = judged(run("bf16-mixed", "bf16-mixed", speed=1.35, seed=2), "MATCHES", MATCHES, band=0.04)
    stock = run("bf16-true", "bf16-true", gap=0.2, speed=1.37, seed=3, updates_lost_fraction=None)
    stock = judged(stock, "DIVERGED", DIVERGED, alarm_at=9, band=0.04)
    ours = judged(run("bf16-master", "bf16-master", speed=1.2, seed=4), "MATCHES", MATCHES, band=0.04)
    overflows = [3, 5, 622, 1105]
    half = run(
        "16-master",
        "16-master",
        speed=0.9,
        seed=5,
        loss_scale=scale_of(STEPS, overflows),
        skipped_steps=overflows,
        skipped_count=4,
        exponents=exponents(-19, 2.0**15, 2400),
        updates_lost_fraction=0.11,
        notes=["fp16 on a CPU is slow, and only good for tests."],
    )
    half = judged(half, "MATCHES", MATCHES, band=0.04)
    return Story(
        title="byte-GPT under five precisions",
        created="2026-11-29 21:41",
        command="lightning-mp compare -c configs/byte_gpt.yaml --precisions 32-true,bf16-mixed,bf16-true,bf16-master,16-master",
        axis="tokens",
        reference="32-true",
        runs=[reference, mixed, stock, ours, half],
    )


def on_a_cpu() -> Story:
    """Runs on a CPU, whose peak has a long name, judged by the file of a baseline; with every way to end."""
    peak = {"peak_label": "peak resident memory of the process"}
    runs = [judged(run("32-true", "32-true", **peak), "MATCHES", MATCHES)]
    runs += [judged(run(name, name, **peak), "NOT COMPARABLE", "Settings differ.") for name in ("bf16-mixed", "bf16-master")]
    runs += [
        RunStory("bf16-true", "bf16-true", status="interrupted", error="it was stopped.", **peak),
        RunStory("16-mixed", "16-mixed", status="failed", error="killed by SIGKILL.", **peak),
        RunStory("16-master", "16-master", status="non-finite", error="the loss became nan at step 3.", **peak),
    ]
    return story_of(*runs, reference="32-true", judged_by="/home/user/baselines/a-project/" + "fp32-" * 20 + ".json")


def two_runs() -> Story:
    """The least that has a verdict, the four numbers and a curve."""
    losses = {"32-true": curve(), "bf16-true": curve() + 0.2}
    numbers = {"peak_gib": 1.0, "tokens_per_s": 100.0, "step_time_ms": 5.0}
    reference, candidate = (RunStory(name, name, loss=series(losses[name][::10]), **numbers) for name in losses)
    found = blocks(losses["bf16-true"], losses["32-true"])
    candidate = replace(candidate, blocks=found, verdict=verdict("DIVERGED", found, DIVERGED, alarm_at=9))
    return story_of(reference, candidate, reference="32-true")


def story_of(*runs: RunStory, reference: str | None = None, **fields: object) -> Story:
    return replace(Story("A comparison", "2026-11-29", "", "tokens", reference, list(runs)), **fields)


def twelve_runs() -> Story:
    """Every verdict, ways to fail, names that are long or hostile, and losses that are not numbers."""
    statuses = ["MATCHES", "DIVERGED", "INCONCLUSIVE", "NOT COMPARABLE", "BETTER"]
    precisions = ["bf16-mixed", "bf16-true", "bf16-master", "16-mixed", "16-master", "16-true", "transformer-engine"]
    runs = [run("32-true", "32-true")]
    for index, status in enumerate(statuses + ["DIVERGED"] * 2):
        gap = {"DIVERGED": 0.3 + 0.1 * index, "BETTER": -0.05, "INCONCLUSIVE": 0.012}.get(status, 0.0)
        one = run(f"candidate {index}", precisions[index], gap=gap, seed=10 + index)
        runs.append(judged(one, status, f"Why it is {status}.", alarm_at=20 + index if status == "DIVERGED" else None))
    broken = curve()
    broken[700:] = math.nan
    broken[650] = math.inf
    runs.append(run(LONG, "bf16-master", seed=20))
    runs.append(run(HOSTILE, "16-mixed", seed=21, what={"note": HOSTILE}, notes=[HOSTILE]))
    runs.append(run("not a number", "bf16-true", seed=22, loss=series(broken), status="non-finite", error="NaN at step 700"))
    runs.append(RunStory("failed", "bf16-master", status="failed", error="killed by SIGKILL. " + HOSTILE))
    return story_of(*runs, reference="32-true", command="lightning-mp compare " + "--data.path=/a/long/path " * 12)


def hostile_numbers() -> Story:
    """Numbers that are not: NaN, infinities, zeros, nothing, and ones that are out of all proportion."""
    nan, inf = math.nan, math.inf
    empty = RunStory("empty", "bf16-true", loss=Series([], []), step_times_ms=[], memory_gib={}, skipped_steps=[])
    zeros = RunStory(
        "zeros",
        "16-master",
        loss=Series([0], [0.0]),
        step_times_ms=[0.0],
        step_time_ms=0.0,
        tokens_per_s=0.0,
        tokens_per_s_series=Series([0], [0.0]),
        memory_gib={"weights": 0.0},
        peak_gib=0.0,
        loss_scale=Series([1], [0.0]),
        skipped_steps=[1],
        exponents=Exponents([0, 1], [1.0]),
        updates_lost_fraction=0.0,
    )
    strange = RunStory(
        "strange",
        "16-mixed",
        loss=Series([1, 2, 3, nan, 5], [1e300, nan, -inf, 1, 2.0]),
        tail_loss=inf,
        step_times_ms=[nan, inf, 3.0],
        step_time_ms=nan,
        tokens_per_s=inf,
        tokens_per_s_series=Series([1, 2], [inf, 1e18]),
        memory_gib={"weights": nan, "masters": inf, "other": 1.0},
        peak_gib=nan,
        loss_scale=Series([1, 2], [nan, 12.0]),
        exponents=Exponents([-3, -2], [0.0]),
        updates_lost_fraction=nan,
        verdict=Verdict(
            "DIVERGED", inf, (nan, inf), nan, None, nan, False, 0, Alarm(0, 2.0, None, inf), None, "NaN at step 2."
        ),
        blocks=[
            Block(0, 1.0, 1e30, 2.0, 1e30, 0.01, 0.01, 0.0, None, None),
            Block(1, 2.0, inf, 2.0, inf, 0.01, 0.01, 9.0, None, None),
        ],
    )
    return story_of(empty, zeros, strange, reference="zeros")
