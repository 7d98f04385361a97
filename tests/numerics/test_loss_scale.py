"""The loss scalers: known sequences, the numeric traps of other scalers, saved states, and simulated gradients."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mp.numerics.loss_scale import (
    CENSORED_STEPS,
    LOG2_FP16_MAX,
    MARGIN_RANGE_BITS,
    MARGIN_STEP_BITS,
    AdaptiveLossScale,
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    make_loss_scale,
)
from tests.benchmarks.loss_scale_traces import REGIMES, bounds, meets, outcome

KNOWN = json.loads((Path(__file__).parent / "loss_scale_vectors.json").read_text())
LOGGER = "lightning_mp.numerics.loss_scale"


def scales(scaler: LossScale, steps: str, amax: float | None = None) -> list[float]:
    """The scale after each step: o is a healthy one, x an overflow."""
    found = []
    for step in steps:
        scaler = scaler.update(finite=step == "o", amax=amax if step == "o" else None)
        found.append(scaler.scale)
    return found


def after(scaler, steps: str, amax: float | None = None):
    for step in steps:
        scaler = scaler.update(finite=step == "o", amax=amax if step == "o" else None)
    return scaler


def settled(amax: float = 2.0**-8, steps: int = 200, **settings) -> AdaptiveLossScale:
    """An adaptive scaler that has long seen gradients of one size."""
    return after(AdaptiveLossScale(**settings), "o" * steps, amax)


def feel(scaler: LossScale, amax: float) -> LossScale:
    """One step of a network whose gradients are at most ``amax``: it overflows beyond fp16's largest number."""
    return scaler.update(finite=amax * scaler.scale <= 65504, amax=amax)


# every scaler with every field off its default
OFF_DEFAULT: dict[str, LossScale] = {
    "none": NoLossScale(),
    "static": StaticLossScale(1024),
    "dynamic": after(
        DynamicLossScale(
            init_scale=2.0**10,
            growth_factor=4.0,
            backoff_factor=0.25,
            growth_interval=3,
            hysteresis=3,
            hysteresis_mode="consecutive",
            min_scale=2.0**-4,
            max_scale=2.0**20,
        ),
        "ooooxxxxoxoox"[:-1],
    ),
    "adaptive": after(
        after(
            AdaptiveLossScale(
                init_scale=2.0**10,
                window=5,
                overflow_probability=0.25,
                margin_bits=0.75,
                growth_bits=2,
                min_scale=2.0**-4,
                max_scale=2.0**20,
            ),
            "ooxoooo",
            2.0**-7,
        ),
        "oo",
        2.0**-6.5,
    ),
}
SCALERS = list(OFF_DEFAULT.values())
KINDS = list(OFF_DEFAULT)


# --- the dynamic rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", KNOWN["vectors"], ids=lambda vector: f"{vector['rule']} {vector['steps']}")
def test_dynamic_gives_the_scales_of_well_known_scalers(vector):
    scaler = DynamicLossScale(
        init_scale=KNOWN["init"],
        growth_factor=KNOWN["growth"],
        backoff_factor=KNOWN["backoff"],
        growth_interval=KNOWN["growth_interval"],
        hysteresis=2 if "hysteresis 2" in vector["rule"] else 1,
        hysteresis_mode="consecutive" if "consecutive" in vector["rule"] else "cumulative",
        min_scale=KNOWN["min_scale"],
    )
    assert scales(scaler, vector["steps"]) == vector["scales"]


@pytest.mark.parametrize("case", KNOWN["single_cases"], ids=lambda case: f"{case['init']} {case['steps']}")
def test_dynamic_gives_the_scales_of_the_single_cases(case):
    settings = {"min_scale": case["min_scale"]} if "min_scale" in case else {}
    scaler = DynamicLossScale(
        init_scale=case["init"],
        growth_factor=case["growth"],
        backoff_factor=case["backoff"],
        growth_interval=case["growth_interval"],
        **settings,
    )
    streaks = []
    for end in range(1, len(case["steps"]) + 1):
        streaks.append(after(scaler, case["steps"][:end]).streak)
    assert scales(scaler, case["steps"]) == case["scales"]
    assert streaks == case.get("streak", streaks)


def test_an_overflow_backs_off_and_only_a_full_run_of_healthy_steps_grows():
    scaler = DynamicLossScale(init_scale=8, growth_interval=3)
    assert scales(scaler, "ooxooxooo") == [8, 8, 4, 4, 4, 2, 2, 2, 4]


def test_growth_beyond_the_ceiling_is_refused_and_not_clipped():
    scaler = DynamicLossScale(init_scale=4, growth_factor=4, growth_interval=1, max_scale=32)
    assert scales(scaler, "ooo") == [16, 16, 16]
    assert scales(DynamicLossScale(init_scale=4, growth_interval=1, max_scale=8), "oo") == [8, 8]


def test_a_refused_growth_still_gives_cumulative_hysteresis_back():
    scaler = DynamicLossScale(init_scale=8, growth_interval=2, hysteresis=2, max_scale=8)
    assert scales(scaler, "xoox") == [8, 8, 8, 8]
    assert scales(scaler, "xox") == [8, 8, 4]


def test_an_overflow_that_is_forgiven_ends_the_streak():
    scaler = after(DynamicLossScale(growth_interval=3, hysteresis=5), "oox")
    assert (scaler.streak, scaler.hysteresis_left, scaler.scale) == (0, 4, 2.0**15)


def test_a_dynamic_scale_does_not_need_amax():
    assert after(DynamicLossScale(), "ooxo", amax=1e-3) == after(DynamicLossScale(), "ooxo")


@pytest.mark.parametrize("make", [DynamicLossScale, AdaptiveLossScale])
def test_at_the_floor_an_overflow_leaves_the_scale(make):
    scaler = make(init_scale=4, min_scale=2)
    assert not scaler.is_at_floor
    scaler = scaler.update(finite=False)
    assert scaler.is_at_floor
    assert scaler.update(finite=False).scale == scaler.scale == 2


def test_scalers_without_a_floor_are_never_at_it():
    assert not NoLossScale().is_at_floor
    assert not StaticLossScale(1).is_at_floor


def test_no_and_static_scale_never_change():
    assert after(NoLossScale(), "oxxo", 3.0) == NoLossScale()
    assert after(StaticLossScale(64), "oxxo", 3.0) == StaticLossScale(64)


# --- the adaptive rule ------------------------------------------------------------------------------------------------


def test_the_settled_scale_is_the_formula_of_the_largest_gradient_in_the_window():
    scaler = AdaptiveLossScale()
    for step in range(400):
        scaler = scaler.update(finite=True, amax=0.004 if step % 100 == 0 else 0.001)
    assert scaler.scale == 2.0 ** math.floor(LOG2_FP16_MAX - 0.25 - math.log2(0.004)) == 2.0**23
    assert 65504 / 2 < 0.004 * scaler.scale < 65504


def test_the_quantile_passes_over_the_share_of_samples_that_may_overflow():
    scaler = AdaptiveLossScale(window=100, overflow_probability=0.02)
    for step in range(100):
        scaler = scaler.update(finite=True, amax=2.0**-10.1 if step in (60, 80) else 2.0**-10.5)
    assert scaler.scale == 2.0**26  # floor(15.9993 - 0.25 + 10.5): the third largest of 100
    assert scaler.update(finite=True, amax=2.0**-10.1).scale == 2.0**25
    assert settled(2.0**-10.5).update(finite=True, amax=2.0**-10.1).scale == 2.0**25  # the largest, by default


def test_the_first_healthy_step_takes_the_scale_where_it_belongs():
    # two bits below where it would be with a full window
    for level, exponent in ((-30, 43), (-3, 16), (0.5, 13), (0.9, 12)):
        assert scales(AdaptiveLossScale(), "o", 2.0**level) == [2.0**exponent]
    assert scales(AdaptiveLossScale(init_scale=2.0**4), "xo", 2.0**-3) == [2.0**3, 2.0**3]  # an overflow was seen


def test_a_later_healthy_step_raises_the_scale_by_the_growth_limit_until_it_is_right():
    scaler = AdaptiveLossScale(window=1).update(finite=True, amax=1.0)
    assert [math.log2(scale) for scale in scales(scaler, "oooooo", 2.0**-3)] == [16, 17, 18, 18, 18, 18]
    scaler = AdaptiveLossScale(window=1, growth_bits=8).update(finite=True, amax=1.0)
    assert scales(scaler, "oo", 2.0**-3) == [2.0**18, 2.0**18]


def test_a_larger_gradient_lowers_the_scale_before_it_overflows():
    scaler = settled(2.0**-8)
    larger = 2.0**-7.2
    assert larger * scaler.scale <= 65504
    assert scaler.update(finite=True, amax=larger).scale == scaler.scale / 2


def test_the_window_forgets_larger_gradients():
    scaler = after(settled(2.0**-8, window=20), "o" * 19, 2.0**-12)
    assert scaler.scale == 2.0**23
    assert after(scaler, "o" * 4, 2.0**-12).scale == 2.0**27
    assert len(after(scaler, "o" * 100, 1.0).log2_amax) == 20


def test_overflows_in_a_row_back_off_by_more_and_more_bits():
    exponents = [math.log2(scale) for scale in scales(AdaptiveLossScale(init_scale=2.0**60), "xxxxxx")]
    assert exponents == [59, 57, 53, 45, 37, 29]


def test_a_healthy_step_ends_the_acceleration():
    scaler = after(AdaptiveLossScale(init_scale=2.0**40), "xxo", 2.0**-60)
    assert math.log2(scaler.update(finite=False).scale) == math.log2(scaler.scale) - 1


@pytest.mark.parametrize("amax", [None, 0.0, -0.0, math.nan, math.inf, -math.inf, -1.0])
def test_a_healthy_step_of_unknown_amax_changes_nothing(amax):
    for scaler in (AdaptiveLossScale(), after(settled(), "xx"), OFF_DEFAULT["adaptive"]):
        assert scaler.update(finite=True, amax=amax) == scaler


@pytest.mark.parametrize("amax", [None, 0.0, 2.0**-8, 1e30, math.nan, math.inf])
def test_amax_is_ignored_on_an_overflow(amax):
    assert settled().update(finite=False, amax=amax) == settled().update(finite=False)


def test_trap_zero_gradients_do_not_poison_the_statistics():
    scaler = settled(2.0**-8)
    for _ in range(1000):
        scaler = scaler.update(finite=True, amax=0.0)
    assert scaler == settled(2.0**-8)
    assert scaler.update(finite=True, amax=2.0**-8).scale == scaler.scale


def test_trap_one_overflow_costs_one_bit_and_is_forgotten_within_some_dozen_steps():
    before = settled(2.0**-8)
    scaler = before.update(finite=False)
    assert scaler.scale == before.scale / 2
    scaler = after(scaler, "o" * (CENSORED_STEPS + 1), 2.0**-8)
    # the learned margin may hold one bit back; a made-up magnitude of 2^16 would have held the scale at 2^-14
    assert before.scale / 2 <= scaler.scale <= before.scale


def test_trap_an_overflow_is_known_only_to_exceed_what_fp16_holds():
    scaler = settled(2.0**-8).update(finite=False)
    assert scaler.censored == (LOG2_FP16_MAX - math.log2(settled(2.0**-8).scale),)
    assert scaler.log2_amax == settled(2.0**-8).log2_amax


def test_trap_gradients_beyond_65504_get_a_scale_below_one():
    scaler: LossScale = AdaptiveLossScale()
    for _ in range(200):
        scaler = feel(scaler, 6e4 * 16)
    assert 2.0**-6 <= scaler.scale <= 2.0**-4
    assert feel(scaler, 6e4 * 16).streak == scaler.streak + 1  # healthy


@pytest.mark.parametrize("amax", [5e-324, 2.3e-308, 1e-45, 1.7e308])
def test_trap_extreme_magnitudes_neither_raise_nor_leave_the_limits(amax):
    scaler = after(AdaptiveLossScale(), "o" * 100, amax)
    assert scaler.min_scale <= scaler.scale <= scaler.max_scale
    assert scaler.scale == (scaler.max_scale if amax < 1 else scaler.min_scale)


def test_trap_one_huge_finite_magnitude_does_not_pin_the_scale():
    before = settled(2.0**-8)
    scaler = before.update(finite=True, amax=1e30)  # a gradient formed in fp32
    assert before.scale / 4 <= scaler.scale < before.scale
    forgotten = after(scaler, "o" * 130, 2.0**-8)
    assert (forgotten.scale, forgotten.log2_amax) == (before.scale, before.log2_amax)


def test_trap_a_burst_of_nan_is_forgotten():
    before = settled(2.0**-8)
    scaler = after(before, "xxxxx")
    assert scaler.scale == before.scale / 2**23
    recovery = scales(scaler, "o" * 64, 2.0**-8)
    assert max(recovery[: CENSORED_STEPS - 1]) < before.scale / 2**15  # the censored samples still count
    assert before.scale / 2 <= recovery[-1] <= before.scale


@pytest.mark.parametrize("bits", [5, 10, 15])
def test_a_jump_of_the_gradients_costs_at_most_four_steps(bits):
    scaler: LossScale = settled(2.0**-8)
    skipped = 0
    for _ in range(100):
        following = feel(scaler, 2.0 ** (bits - 8))
        skipped += following.streak == 0
        scaler = following
    assert 1 <= skipped <= 4
    headroom = LOG2_FP16_MAX - (bits - 8) - math.log2(scaler.scale)
    assert 0 <= headroom <= 2.5


def test_overflows_that_amax_does_not_show_are_learned():
    """As when a gradient inside the network is 2^5 times larger than all that arrive at the parameters."""
    scaler: LossScale = AdaptiveLossScale()
    skipped_late = 0
    for step in range(8000):
        finite = 2.0**-3 * scaler.scale <= 65504
        scaler = scaler.update(finite=finite, amax=2.0**-8)
        skipped_late += step >= 2000 and not finite
    assert skipped_late <= 6000 * scaler.overflow_probability + 1
    assert 2.0**15 <= scaler.scale <= 2.0**19


def test_what_no_scale_cures_is_learned_up_to_a_limit():
    scaler = after(AdaptiveLossScale(), "xo" * 200, 2.0**-8)
    assert scaler.margin == pytest.approx(0.25 + MARGIN_RANGE_BITS, abs=0.01)


@given(st.lists(st.booleans(), max_size=300), st.floats(1e-4, 0.5), st.floats(0, 4))
def test_runs_of_overflows_are_bounded_by_the_probability_whatever_the_gradients_do(steps, probability, margin_bits):
    scaler = AdaptiveLossScale(overflow_probability=probability, margin_bits=margin_bits)
    runs = healthy = 0
    for step, finite in enumerate(steps):
        runs += not finite and (step == 0 or steps[step - 1])
        healthy += finite
        scaler = scaler.update(finite=finite, amax=1e-3)
        learned = scaler.margin - scaler.margin_bits
        assert 0 <= learned <= MARGIN_RANGE_BITS
        if learned == MARGIN_RANGE_BITS:
            return  # as much as it may learn
        assert runs <= probability * healthy + learned / MARGIN_STEP_BITS + 1e-6


# --- all scalers ------------------------------------------------------------------------------------------------------

AMAX = st.one_of(st.none(), st.floats(), st.floats(1e-12, 1e6))
STEPS = st.lists(st.tuples(st.booleans(), AMAX), max_size=60)
EXPONENTS = st.tuples(st.integers(-20, 30), st.integers(-20, 30), st.integers(-20, 30)).map(sorted)


@st.composite
def scalers(draw: st.DrawFn) -> LossScale:
    lowest, first, highest = (2.0**exponent for exponent in draw(EXPONENTS))
    kind = draw(st.sampled_from(KINDS))
    if kind == "none":
        return NoLossScale()
    if kind == "static":
        return StaticLossScale(first)
    if kind == "dynamic":
        return DynamicLossScale(
            init_scale=first,
            growth_factor=draw(st.sampled_from([2.0, 4.0])),
            backoff_factor=draw(st.sampled_from([0.5, 0.25])),
            growth_interval=draw(st.integers(1, 4)),
            hysteresis=draw(st.integers(1, 3)),
            hysteresis_mode=draw(st.sampled_from(["cumulative", "consecutive"])),
            min_scale=lowest,
            max_scale=highest,
        )
    return AdaptiveLossScale(
        init_scale=first,
        window=draw(st.integers(1, 6)),
        overflow_probability=draw(st.floats(1e-5, 0.9)),
        margin_bits=draw(st.floats(0, 5)),
        growth_bits=draw(st.integers(1, 4)),
        min_scale=lowest,
        max_scale=highest,
    )


@given(scalers(), STEPS)
def test_the_scale_is_always_a_power_of_two_within_its_limits(scaler, steps):
    for finite, amax in steps:
        scaler = scaler.update(finite=finite, amax=amax)
        assert math.frexp(scaler.scale)[0] == 0.5
        assert getattr(scaler, "min_scale", 0.0) <= scaler.scale <= getattr(scaler, "max_scale", math.inf)


@given(scalers(), STEPS)
def test_the_scale_falls_on_an_overflow_and_grows_only_on_a_healthy_step(scaler, steps):
    for finite, amax in steps:
        following = scaler.update(finite=finite, amax=amax)
        if not finite:
            assert following.scale <= scaler.scale
        if isinstance(scaler, AdaptiveLossScale) and not finite and not scaler.is_at_floor:
            assert following.scale < scaler.scale
        scaler = following


@given(scalers(), STEPS, AMAX, st.booleans())
def test_an_update_is_deterministic_and_leaves_its_object_as_it_was(scaler, steps, amax, finite):
    for healthy, magnitude in steps:
        scaler = scaler.update(finite=healthy, amax=magnitude)
    before = copy.deepcopy(scaler)
    assert scaler.update(finite=finite, amax=amax) == scaler.update(finite=finite, amax=amax)
    assert scaler == before
    assert hash(scaler) == hash(before)


def through_json(state: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(state, allow_nan=False))


def through_torch(state: dict[str, object]) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@given(scalers(), STEPS, STEPS)
def test_a_restored_state_is_equal_and_goes_on_alike(scaler, steps, next_steps):
    for finite, amax in steps:
        scaler = scaler.update(finite=finite, amax=amax)
    fresh = {
        "none": NoLossScale(),
        "static": StaticLossScale(3),
        "dynamic": DynamicLossScale(),
        "adaptive": AdaptiveLossScale(),
    }
    for through in (through_json, through_torch):
        restored = fresh[scaler.kind].load_state_dict(through(scaler.state_dict()))
        original = scaler
        assert restored == original
        for finite, amax in next_steps:
            original, restored = original.update(finite=finite, amax=amax), restored.update(finite=finite, amax=amax)
            assert restored == original


@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive"])
def test_the_sample_for_saved_states_has_every_field_off_its_default(kind):
    default = {"static": StaticLossScale(1), "dynamic": DynamicLossScale(), "adaptive": AdaptiveLossScale()}[kind]
    scaler = OFF_DEFAULT[kind]
    same = [f.name for f in dataclasses.fields(scaler) if getattr(scaler, f.name) == getattr(default, f.name)]
    # these two exclude each other: one is zero
    assert set(same) <= {"overflows_in_a_row"}
    if same:
        assert scaler.update(finite=False).overflows_in_a_row == 1


@pytest.mark.parametrize(
    "scaler", [*SCALERS, OFF_DEFAULT["adaptive"].update(finite=False)], ids=[*KINDS, "adaptive overflowed"]
)
def test_a_state_dict_names_its_kind_and_every_field_in_plain_values(scaler):
    state = scaler.state_dict()
    assert set(state) == {"kind"} | {item.name for item in dataclasses.fields(scaler)}
    assert all(type(value) in (int, float, str, list) for value in state.values())
    assert state["kind"] in KINDS


@pytest.mark.parametrize("scaler", SCALERS, ids=KINDS)
def test_copies_and_pickles_are_equal_and_go_on_alike(scaler):
    for other in (copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(other) is type(scaler)
        assert other == scaler
        assert after(other, "xoxxoo", 1e-3) == after(scaler, "xoxxoo", 1e-3)


@pytest.mark.parametrize("scaler", SCALERS, ids=KINDS)
def test_scalers_are_frozen(scaler):
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaler.scale = 2.0


@pytest.mark.parametrize("make", [DynamicLossScale, AdaptiveLossScale])
def test_the_constructor_takes_settings_only(make):
    for name in ("scale", "streak"):
        with pytest.raises(TypeError, match="unexpected keyword"):
            make(**{name: 1})


def test_equality_covers_the_state():
    assert DynamicLossScale().update(finite=True) != DynamicLossScale()
    assert AdaptiveLossScale().update(finite=True, amax=2.0**-1) != AdaptiveLossScale()
    assert DynamicLossScale(init_scale=4) != AdaptiveLossScale(init_scale=4)


# --- saved states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "adaptive"])
def test_saved_values_win_over_the_constructor_s_settings_included(kind):
    make = {"dynamic": DynamicLossScale, "adaptive": AdaptiveLossScale}[kind]
    settings = {"init_scale": 2.0**5, "min_scale": 2.0**5, "max_scale": 2.0**6}
    constructed = make(**settings)
    assert constructed.load_state_dict(OFF_DEFAULT[kind].state_dict()) == OFF_DEFAULT[kind]
    assert constructed == make(**settings)


@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive"])
def test_a_missing_key_keeps_the_present_value_and_is_named(kind, caplog):
    present = {"static": StaticLossScale(2), "dynamic": DynamicLossScale(), "adaptive": AdaptiveLossScale()}[kind]
    state = OFF_DEFAULT[kind].state_dict()
    for name in state:
        caplog.clear()
        partial = {key: value for key, value in state.items() if key != name}
        with caplog.at_level("INFO", LOGGER):
            restored = present.load_state_dict(partial)
        assert [record for record in caplog.messages if f"lacks {name};" in record] == caplog.messages[:1]
        if name not in ("kind", "margin"):  # the margin has to fit the saved `margin_bits`
            assert getattr(restored, name) == getattr(present, name)
        others = {key: value for key, value in restored.state_dict().items() if key not in (name, "hysteresis_left")}
        assert others == {key: state[key] for key in others}


def test_what_does_not_fit_the_present_limits_of_a_partial_state_is_cut_to_them():
    dynamic = DynamicLossScale(hysteresis=2).load_state_dict({"kind": "dynamic", "hysteresis_left": 3})
    assert dynamic.hysteresis_left == 2
    saved = {"kind": "adaptive", "log2_amax": [-3.0, -4.0, -5.0], "margin": 100.0}
    adaptive = AdaptiveLossScale(window=2, margin_bits=1).load_state_dict(saved)
    assert adaptive.log2_amax == (-4.0, -5.0)
    assert adaptive.margin == 1 + MARGIN_RANGE_BITS
    assert adaptive.load_state_dict({"margin": 0.0}).margin == 1


def test_a_state_without_any_key_changes_nothing_and_says_so_in_one_line(caplog):
    with caplog.at_level("INFO", LOGGER):
        assert settled().load_state_dict({}) == settled()
    assert len(caplog.messages) == 1
    assert "kind, init_scale, window" in caplog.messages[0]


def test_unknown_keys_are_ignored_and_named(caplog):
    scaler = OFF_DEFAULT["dynamic"]
    with caplog.at_level("INFO", LOGGER):
        assert DynamicLossScale().load_state_dict({**scaler.state_dict(), "_growth_tracker": 3, "z": 1}) == scaler
    assert len(caplog.messages) == 1
    assert "_growth_tracker, z" in caplog.messages[0]


def test_a_complete_state_is_loaded_without_a_word(caplog):
    with caplog.at_level("INFO", LOGGER):
        for scaler in SCALERS:
            scaler.load_state_dict(scaler.state_dict())
    assert caplog.messages == []


@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive"])
def test_of_another_kind_only_the_scale_is_taken_over(kind, caplog):
    present = settled(2.0**-8) if kind != "adaptive" else DynamicLossScale(growth_interval=7).update(finite=True)
    with caplog.at_level("INFO", LOGGER):
        restored = present.load_state_dict(OFF_DEFAULT[kind].state_dict())
    assert restored == present.with_scale(OFF_DEFAULT[kind].scale)
    assert len(caplog.messages) == 1
    assert kind in caplog.messages[0]


def test_a_scale_that_is_taken_over_is_bounded_by_the_limits():
    state = StaticLossScale(2.0**40).state_dict()
    assert DynamicLossScale(max_scale=2.0**20).load_state_dict(state).scale == 2.0**20


def test_a_run_without_scaling_leaves_the_first_scale_as_it_is(caplog):
    with caplog.at_level("INFO", LOGGER):
        assert DynamicLossScale().load_state_dict(NoLossScale().state_dict()) == DynamicLossScale()
    assert "'none'" in caplog.messages[0]


def test_a_saved_scale_outside_the_limits_is_bounded_and_logged(caplog):
    with caplog.at_level("INFO", LOGGER):
        assert DynamicLossScale(min_scale=2).load_state_dict({"kind": "dynamic", "scale": 1.0}).scale == 2
    assert "outside its limits" in caplog.messages[-1]


BAD_STATES = [
    ("dynamic", "scale", -1.0),
    ("dynamic", "scale", math.nan),
    ("dynamic", "scale", "big"),
    ("dynamic", "scale", 1e39),
    ("dynamic", "scale", None),
    ("dynamic", "streak", -1),
    ("dynamic", "streak", 1.5),
    ("dynamic", "growth_factor", 1.0),
    ("dynamic", "hysteresis_left", -1),
    ("dynamic", "hysteresis_mode", "sometimes"),
    ("adaptive", "log2_amax", [1.0, math.nan]),
    ("adaptive", "log2_amax", 3.0),
    ("adaptive", "log2_amax", [-math.inf]),
    ("adaptive", "censored", ["x"]),
    ("adaptive", "margin", math.inf),
    ("adaptive", "overflows_in_a_row", True),
    ("adaptive", "window", 0),
    ("static", "scale", 0.0),
]


@pytest.mark.parametrize(("kind", "name", "value"), BAD_STATES)
def test_a_bad_saved_value_is_refused_by_name(kind, name, value):
    state = {**OFF_DEFAULT[kind].state_dict(), name: value}
    with pytest.raises(ValueError, match=name):
        OFF_DEFAULT[kind].load_state_dict(state)


def test_a_bad_scale_of_another_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="scale"):
        DynamicLossScale().load_state_dict({"kind": "static", "scale": math.inf})


# --- settings ---------------------------------------------------------------------------------------------------------

BAD_SETTINGS = [
    (StaticLossScale, {"scale": 0}, "scale is 0, but must be above 0"),
    (StaticLossScale, {"scale": True}, "scale is True, but must be a number"),
    (StaticLossScale, {"scale": math.nan}, "must be finite"),
    (StaticLossScale, {"scale": 1e39}, "normal fp32 number"),
    (StaticLossScale, {"scale": "8"}, "must be a number"),
    (DynamicLossScale, {"init_scale": -1}, "init_scale is -1"),
    (DynamicLossScale, {"init_scale": 0.5}, "between min_scale = 1 and"),
    (DynamicLossScale, {"init_scale": 8, "max_scale": 4}, "max_scale = 4"),
    (DynamicLossScale, {"max_scale": math.inf}, "max_scale is inf, but must be finite"),
    (DynamicLossScale, {"max_scale": 10**400}, "must be finite"),
    (DynamicLossScale, {"min_scale": 0}, "min_scale is 0"),
    (DynamicLossScale, {"min_scale": 1e-40}, "normal fp32 number"),
    (DynamicLossScale, {"growth_factor": 1}, "growth_factor is 1, but must be above 1"),
    (DynamicLossScale, {"growth_factor": math.inf}, "growth_factor"),
    (DynamicLossScale, {"backoff_factor": 1}, "backoff_factor is 1, but must be below 1"),
    (DynamicLossScale, {"backoff_factor": 0}, "backoff_factor"),
    (DynamicLossScale, {"growth_interval": 0}, "growth_interval is 0, but must be a whole number, at least 1"),
    (DynamicLossScale, {"growth_interval": 2.0}, "growth_interval is 2.0"),
    (DynamicLossScale, {"growth_interval": True}, "growth_interval is True"),
    (DynamicLossScale, {"hysteresis": 0}, "hysteresis is 0"),
    (DynamicLossScale, {"hysteresis_mode": "none"}, "'cumulative' or 'consecutive'"),
    (AdaptiveLossScale, {"window": 0}, "window is 0"),
    (AdaptiveLossScale, {"window": 2000}, "from 1 to 1024"),
    (AdaptiveLossScale, {"overflow_probability": 0}, "overflow_probability is 0"),
    (AdaptiveLossScale, {"overflow_probability": 1}, "between 0 and 1"),
    (AdaptiveLossScale, {"margin_bits": -0.5}, "margin_bits is -0.5"),
    (AdaptiveLossScale, {"margin_bits": math.nan}, "margin_bits is nan"),
    (AdaptiveLossScale, {"growth_bits": 0}, "growth_bits is 0"),
    (AdaptiveLossScale, {"min_scale": 2.0**16}, "min_scale = 65536"),
]


@pytest.mark.parametrize(("make", "settings", "message"), BAD_SETTINGS)
def test_a_bad_setting_is_refused_with_the_value_and_the_legal_ones(make, settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make(**settings)


def test_integers_are_taken_where_a_float_is_meant():
    scaler = DynamicLossScale(init_scale=256, growth_factor=2)
    assert (type(scaler.scale), type(scaler.init_scale), type(scaler.growth_factor)) == (float, float, float)


@pytest.mark.parametrize("scaler", [DynamicLossScale(max_scale=2.0**20), AdaptiveLossScale(max_scale=2.0**20)])
def test_with_scale_changes_the_scale_alone_and_stays_within_the_limits(scaler):
    scaler = after(scaler, "oxo", 2.0**-3)
    other = scaler.with_scale(2.0**7)
    assert other.scale == 2.0**7
    assert other.state_dict() == {**scaler.state_dict(), "scale": 2.0**7}
    assert scaler.with_scale(1e300).scale == 2.0**20
    assert scaler.with_scale(1e-300).scale == scaler.min_scale


def test_with_scale_of_the_scalers_without_limits():
    assert StaticLossScale(8).with_scale(4) == StaticLossScale(4)
    assert NoLossScale().with_scale(4) == NoLossScale()


@pytest.mark.parametrize("scaler", SCALERS, ids=KINDS)
@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, True, "1"])
def test_with_scale_refuses_what_is_no_scale(scaler, scale):
    with pytest.raises(ValueError, match="scale is"):
        scaler.with_scale(scale)


def test_make_loss_scale_reads_a_setting():
    given_scaler = DynamicLossScale(growth_interval=5)
    assert make_loss_scale(given_scaler) is given_scaler
    assert make_loss_scale(1024) == make_loss_scale(1024.0) == StaticLossScale(1024)
    assert make_loss_scale("none") == NoLossScale()
    assert make_loss_scale("dynamic") == DynamicLossScale()
    assert make_loss_scale("adaptive") == AdaptiveLossScale()


@pytest.mark.parametrize("value", ["static", "Dynamic", "", True, False, None, [2], object])
def test_make_loss_scale_names_the_legal_values(value):
    with pytest.raises(ValueError, match="must be 'none', 'dynamic' or 'adaptive', a number") as error:
        make_loss_scale(value)
    assert repr(value) in str(error.value)


def test_make_loss_scale_refuses_a_number_that_is_no_scale():
    with pytest.raises(ValueError, match="above 0"):
        make_loss_scale(0)


# --- simulated gradients ----------------------------------------------------------------------------------------------

STEPS_PER_TRACE = 20_000


@pytest.mark.parametrize("regime", REGIMES)
def test_adaptive_wastes_less_headroom_than_dynamic_at_hardly_more_skips(regime):
    dynamic = outcome(DynamicLossScale(), regime, STEPS_PER_TRACE, seeds=2)
    adaptive = outcome(AdaptiveLossScale(), regime, STEPS_PER_TRACE, seeds=2)
    bound = bounds(dynamic, regime, STEPS_PER_TRACE)
    assert meets(adaptive, bound), (adaptive, bound)


def test_the_bounds_on_simulated_gradients_can_fail():
    regime, steps = "jump up 10 bits", STEPS_PER_TRACE
    dynamic = outcome(DynamicLossScale(), regime, steps, seeds=1)
    bound = bounds(dynamic, regime, steps)
    assert not meets(dynamic, bound)  # headroom, and the run of skips
    often = outcome(DynamicLossScale(growth_interval=200), regime, steps, seeds=1)
    assert often.skipped > bound.skipped
    timid = outcome(AdaptiveLossScale(margin_bits=3.0), regime, steps, seeds=1)
    assert timid.headroom_bits > bound.headroom_bits


def test_the_simulated_regimes_are_what_they_say():
    traces = {name: make(np.random.default_rng(0), 4000) for name, make in REGIMES.items()}
    halves = {name: trace[2000:].mean() - trace[:2000].mean() for name, trace in traces.items()}
    assert halves["jump up 10 bits"] - halves["steady, autocorrelated"] == pytest.approx(10)
    assert halves["drift up 5 bits"] > 2 > -2 > halves["drift down 5 bits"]
    assert halves["warm-up decay"] < -2
    assert traces["spikes"].max() - np.median(traces["spikes"]) > 5
