"""Schedule tables are valid for any stages, on any devices, for any legal count."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import schedules, stage_layouts

from millrace.config import ConfigurationError
from millrace.schedule.stages import place_stages
from millrace.schedule.table import SCHEDULES, build_table, peak_deferred, peak_live

FOUR = place_stages([1, 1, 1, 1], None)


def idle_fraction(table):
    """Return the share of device ticks without an action."""
    return 1 - sum(map(len, table.ticks)) / (len(table.ticks) * table.stages.num_devices)


def when(table):
    """Return the tick of every action."""
    ticks = {}
    for tick, actions in enumerate(table.ticks):
        for device, action in actions.items():
            assert table.stages.device_of[action.stage] == device
            assert action not in ticks, "done twice"
            ticks[action] = tick
    return ticks


def all_actions(table):
    kinds = ("forward", "backward") if table.training else ("forward",)
    if table.schedule == "zero-bubble" and table.training:
        kinds = ("forward", "backward", "weights")
    return {
        (kind, stage, micro_batch)
        for kind in kinds
        for stage in range(table.stages.num_stages)
        for micro_batch in range(table.num_micro_batches)
    }


def needs(table, kind, stage, micro_batch):
    """Return what an action needs, by the definition of a pipeline."""
    groups, position = table.stages.groups, table.stages.position_of(stage)
    if kind == "weights":
        return [("backward", stage, micro_batch)]
    if kind == "forward":
        before = groups[position - 1] if position else ()
        return [("forward", other, micro_batch) for other in before]
    own = [("forward", other, micro_batch) for other in groups[position]]
    after = groups[position + 1] if position + 1 < len(groups) else ()
    return own + [("backward", other, micro_batch) for other in after]


either = st.booleans()


@st.composite
def tables(draw, training=either, schedule=schedules):
    stages = draw(stage_layouts())
    count = 2 * stages.num_positions * draw(st.integers(1, 4))
    return build_table(draw(schedule), stages, count, training=draw(training))


@settings(deadline=None)
@given(tables())
def test_each_stage_does_everything_for_every_micro_batch_once(table):
    assert set(when(table)) == all_actions(table)


@settings(deadline=None)
@given(tables())
def test_an_action_uses_only_results_of_earlier_ticks(table):
    ticks = when(table)
    for action, tick in ticks.items():
        for needed in needs(table, *action):
            assert ticks[needed] < tick, (needed, action)


@settings(deadline=None)
@given(tables())
def test_micro_batches_keep_their_order_at_every_stage(table):
    order = sorted(when(table).items(), key=lambda item: item[1])
    for kind in ("forward", "backward", "weights"):
        for stage in range(table.stages.num_stages):
            passed = [a.micro_batch for a, _ in order if (a.kind, a.stage) == (kind, stage)]
            assert passed == sorted(passed)


@settings(deadline=None)
@given(tables())
def test_no_tick_is_empty(table):
    assert all(table.ticks)


@settings(deadline=None)
@given(tables(training=st.just(True)))
def test_held_micro_batches_stay_within_the_bound_of_the_schedule(table):
    count = table.stages.num_positions
    for stage, live in enumerate(peak_live(table)):
        distance = count - 1 - table.stages.position_of(stage)
        at_most = {
            "grouped": 2 * distance + 1,
            "interleaved": distance + 1,
            "sequential": 1,
            "zero-bubble": max(1, 4 * count // 3),
        }
        assert 1 <= live <= at_most[table.schedule]


@settings(deadline=None)
@given(tables(training=st.just(True)))
def test_weight_gradients_are_deferred_by_zero_bubble_only(table):
    for deferred, live in zip(peak_deferred(table), peak_live(table), strict=True):
        assert (0 < deferred <= live) == (table.schedule == "zero-bubble")


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 4))
def test_with_one_device_per_stage_the_bounds_are_reached(num_stages, passes):
    stages = place_stages([1] * num_stages, None)
    count = 2 * num_stages * passes
    distances = range(num_stages - 1, -1, -1)
    grouped = peak_live(build_table("grouped", stages, count))
    interleaved = peak_live(build_table("interleaved", stages, count))
    assert grouped == [2 * distance + 1 for distance in distances]
    assert interleaved == [distance + 1 for distance in distances]


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 4))
def test_with_one_device_per_stage_interleaved_holds_no_more_than_grouped(shape, passes):
    """If stages share devices, only the bounds compare: each of two orders of the same
    work can be better at some stage."""
    stages = place_stages(shape, None)
    count = 2 * stages.num_positions * passes
    interleaved = peak_live(build_table("interleaved", stages, count))
    grouped = peak_live(build_table("grouped", stages, count))
    for held, at_most in zip(interleaved, grouped, strict=True):
        assert held <= at_most


@settings(deadline=None)
@given(stage_layouts(), st.integers(1, 4))
def test_results_do_not_pile_up_between_stages_in_inference(stages, passes):
    table = build_table("grouped", stages, stages.num_positions * passes, training=False)
    assert peak_live(table) == [0] * stages.num_stages
    done = [0] * stages.num_stages
    for tick in table.ticks:
        for action in tick.values():
            done[action.stage] += 1
        for before, after in zip(stages.groups, stages.groups[1:], strict=False):
            for stage in before:
                assert done[stage] - min(done[other] for other in after) <= 2


@settings(deadline=None)
@given(tables(schedule=st.just("grouped"), training=st.just(True)))
def test_all_devices_go_in_the_same_direction_in_grouped(table):
    directions = [{action.kind for action in tick.values()} for tick in table.ticks]
    assert all(len(kinds) == 1 for kinds in directions)


@settings(deadline=None)
@given(tables(schedule=st.just("sequential")))
def test_only_one_micro_batch_is_in_the_pipeline_in_sequential(table):
    seen = [action.micro_batch for tick in table.ticks for action in tick.values()]
    assert seen == sorted(seen)


@pytest.mark.parametrize(("schedule", "tick"), [("grouped", 11), ("interleaved", 8)])
def test_the_first_micro_batch_of_four_stages_is_back_at_the_published_time(schedule, tick):
    table = build_table(schedule, FOUR, 16)
    assert when(table)[("backward", 0, 0)] + 1 == tick  # the tutorial counts from 1


@pytest.mark.parametrize("schedule", ["grouped", "interleaved"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("passes", [1, 3])
def test_equal_stages_on_their_own_devices_are_idle_as_predicted_by_theory(
    schedule, num_stages, passes
):
    count = 2 * num_stages * passes
    table = build_table(schedule, place_stages([1] * num_stages, None), count)
    assert len(table.ticks) == 2 * (count + num_stages - 1)
    expected = (num_stages - 1) / (count + num_stages - 1)
    assert idle_fraction(table) == pytest.approx(expected)


@pytest.mark.parametrize("num_stages", [*range(1, 13), 16, 32, 64])
@pytest.mark.parametrize("passes", [1, 3])
def test_zero_bubble_is_idle_only_while_the_pipeline_fills_and_drains(num_stages, passes):
    """The last stage starts N - 1 ticks after the first, and then all have work."""
    count = num_stages * passes
    table = build_table("zero-bubble", place_stages([1] * num_stages, None), count)
    assert len(table.ticks) == 3 * count + num_stages - 1


def test_sequential_uses_one_device_at_a_time():
    assert idle_fraction(build_table("sequential", FOUR, 5)) == pytest.approx(3 / 4)


def test_two_stages_per_device_keep_it_busy_almost_always():
    stages = place_stages([1] * 4, [0, 1, 1, 0])
    assert idle_fraction(build_table("interleaved", stages, 32)) < 0.03
    assert idle_fraction(build_table("grouped", stages, 32)) < 0.05


@pytest.mark.parametrize(
    ("schedule", "count", "training", "message"),
    [
        ("grouped", 12, True, "multiple of 8 for the grouped schedule .* Use 8 or 16"),
        ("grouped", 4, True, r"Use 8\."),
        ("grouped", 6, False, r"num_micro_batches \(6\) .* multiple of 4 .* 4 or 8"),
        ("interleaved", 6, True, "multiple of 4 for the interleaved .* 4 or 8"),
        ("sequential", 0, True, r"gradient_accumulation_count \(0\) .* Use 1"),
        ("interleaved", -4, True, "positive multiple of 4"),
    ],
)
def test_a_count_that_does_not_fit_is_rejected_with_the_nearest(
    schedule, count, training, message
):
    with pytest.raises(ConfigurationError, match=message):
        build_table(schedule, FOUR, count, training=training)


def test_legal_counts_depend_on_positions_not_on_stages_or_devices():
    stages = place_stages([1, 3, 1], [0, [0, 1, 2], 1])
    assert build_table("grouped", stages, 6).num_micro_batches == 6
    with pytest.raises(ConfigurationError, match="multiple of 6"):
        build_table("grouped", stages, 10)


def test_schedule_names_ignore_case_and_typos_get_a_suggestion():
    assert build_table("Interleaved", FOUR, 4).schedule == "interleaved"
    with pytest.raises(ConfigurationError, match="Did you mean interleaved"):
        build_table("interleave", FOUR, 4)
    names = "one of grouped, interleaved, sequential, zero-bubble"
    with pytest.raises(ConfigurationError, match=names):
        build_table("1f1b", FOUR, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "mapping", [None, pytest.param([0] * 64, marks=pytest.mark.slow)], ids=["own", "one"]
)
def test_a_large_pipeline_takes_seconds(schedule, mapping):
    start = time.process_time()
    table = build_table(schedule, place_stages([1] * 64, mapping), 512)
    assert time.process_time() - start < 5
    kinds = 3 if schedule == "zero-bubble" else 2
    assert sum(map(len, table.ticks)) == kinds * 64 * 512
