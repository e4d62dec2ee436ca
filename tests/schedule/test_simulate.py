"""Simulated times compared with closed forms and with bounds for any pipeline."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import schedules, stage_layouts

from millrace.config import ConfigurationError
from millrace.schedule.simulate import Costs, Link, simulate
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table, peak_deferred, peak_live

seconds = st.floats(0.01, 10)
executions = st.sampled_from(["ticks", "free"])


def chain(num_stages, mapping=None):
    return place_stages([1] * num_stages, mapping)


def equal(num_stages, forward=1.0, backward=2.0, **others):
    return Costs(
        forward=(forward,) * num_stages, backward=(backward,) * num_stages, **others
    )


# Closed forms


@settings(deadline=None)
@given(
    st.sampled_from([("grouped", "free"), ("interleaved", "free"), ("grouped", "ticks")]),
    st.integers(1, 6),
    st.integers(1, 4),
    seconds,
    seconds,
)
def test_equal_stages_are_idle_as_predicted_by_theory_for_any_backward_cost(
    how, num_stages, passes, forward, backward
):
    schedule, execution = how
    count = 2 * num_stages * passes
    table = build_table(schedule, chain(num_stages), count)
    result = simulate(table, equal(num_stages, forward, backward), execution=execution)
    turns = count + num_stages - 1
    assert result.seconds == pytest.approx(turns * (forward + backward))
    assert result.bubble_fraction == pytest.approx((num_stages - 1) / turns, abs=1e-9)


@pytest.mark.parametrize("execution", ["ticks", "free"])
def test_sequential_takes_the_sum_of_everything(execution):
    costs = Costs(forward=(1.0, 2.0, 3.0), backward=(2.0, 5.0, 6.0))
    result = simulate(build_table("sequential", chain(3), 5), costs, execution=execution)
    assert result.seconds == pytest.approx(5 * 19)
    assert result.busy_seconds == pytest.approx([5 * 3, 5 * 7, 5 * 9])
    assert result.bubble_fraction == pytest.approx(2 / 3)


def test_a_forward_pass_waits_for_a_backward_pass_in_the_same_tick():
    """The reason for Grouped: its ticks are of one kind, so no pass waits."""
    tables = {name: build_table(name, chain(4), 16) for name in ("grouped", "interleaved")}
    equal_times = equal(4, forward=1, backward=1)
    for table in tables.values():
        assert simulate(table, equal_times).seconds == pytest.approx(2 * 19)
    grouped, interleaved = (simulate(table, equal(4)).seconds for table in tables.values())
    assert grouped == pytest.approx(19 * 3)
    assert interleaved > 1.2 * grouped


@settings(deadline=None)
@given(st.lists(seconds, min_size=1, max_size=6), st.integers(1, 5))
def test_the_slowest_stage_sets_the_pace_of_inference(forwards, passes):
    num_stages = len(forwards)
    count = num_stages * passes
    table = build_table("interleaved", chain(num_stages), count, training=False)
    result = simulate(table, Costs(forward=tuple(forwards)), execution="free")
    assert result.seconds == pytest.approx(sum(forwards) + (count - 1) * max(forwards))


@pytest.mark.parametrize("sending", [0.25, 1.0, 4.0])
def test_results_queue_on_a_link_while_the_devices_work(sending):
    link = Link(bytes_per_second=100, latency_seconds=0.125)
    costs = Costs(forward=(1.0,) * 4, output_bytes=(100 * sending,) * 4)
    table = build_table("grouped", chain(4), 12, training=False)
    result = simulate(table, costs, link, execution="free")
    expected = 4 + 3 * (0.125 + sending) + 11 * max(1.0, sending)
    assert result.seconds == pytest.approx(expected)


def test_zero_bubble_takes_at_most_083_of_the_time_of_grouped():
    tables = {name: build_table(name, chain(4), 8) for name in ("grouped", "zero-bubble")}
    grouped, zero_bubble = (simulate(table, equal(4)).seconds for table in tables.values())
    assert grouped == pytest.approx(33)
    assert zero_bubble == pytest.approx(27) and zero_bubble <= 0.83 * grouped


@pytest.mark.parametrize("execution", ["ticks", "free"])
def test_unequal_parts_of_a_backward_pass_take_the_given_times(execution):
    table = build_table("zero-bubble", chain(1), 5)
    costs = equal(1, weight_gradient=(0.5,), recompute=(1.0,))
    result = simulate(table, costs, execution=execution)
    assert result.seconds == pytest.approx(5 * (1 + 1 + 2))
    seconds = {span.kind: span.end - span.start for span in result.timeline}
    assert seconds == pytest.approx({"forward": 1, "backward": 2.5, "weights": 0.5})
    with pytest.raises(ConfigurationError, match="part of backward"):
        equal(1, weight_gradient=(2.5,))


def test_every_exchange_adds_to_the_time_in_ticks():
    link = Link(bytes_per_second=100, latency_seconds=0.5)
    costs = equal(4, output_bytes=(50.0,) * 4)
    result = simulate(build_table("grouped", chain(4), 8), costs, link)
    # 22 ticks; nothing is sent after the last forward and after the last backward.
    assert result.seconds == pytest.approx(11 * 3 + 20 * 1.0)
    assert sum(result.busy_seconds) == pytest.approx(4 * 8 * 3)


def test_stages_on_one_device_need_no_transfer():
    costs = equal(3, output_bytes=(1e9,) * 3)
    table = build_table("interleaved", chain(3, [0, 0, 0]), 6)
    for execution in ("ticks", "free"):
        result = simulate(table, costs, Link(bytes_per_second=1), execution=execution)
        assert result.seconds == pytest.approx(3 * 6 * 3)
        assert result.bubble_fraction == pytest.approx(0)


def test_recomputation_makes_the_backward_longer():
    table = build_table("grouped", chain(2), 4)
    kept = simulate(table, equal(2)).seconds
    again = simulate(table, equal(2, recompute=(1.0, 1.0))).seconds
    assert (kept, again) == (pytest.approx(5 * 3), pytest.approx(5 * 4))


def test_the_update_follows_the_all_reduce():
    costs = equal(2, all_reduce=(0.5, 1.0), update=(2.0, 3.0))
    table = build_table("grouped", chain(2), 4)
    together = simulate(table, costs)
    assert together.seconds == pytest.approx(5 * 3 + 1 + 3)
    free = simulate(table, costs, execution="free")
    # The last stage finishes its backward passes one pass earlier.
    assert free.seconds == pytest.approx(max(5 * 3 + 2.5, 5 * 3 - 2 + 4))
    kinds = [span.kind for span in together.timeline if span.device == 0]
    assert kinds[-2:] == ["all_reduce", "update"]
    inference = build_table("grouped", chain(2), 4, training=False)
    assert simulate(inference, costs).seconds == pytest.approx(5)


# Memory


def test_pending_weight_gradients_hold_a_gradient_of_what_is_stored():
    """Of 5 micro-batches at the last of four stages, all 5 wait for weight gradients."""
    table = build_table("zero-bubble", chain(4), 8)
    assert (peak_live(table)[3], peak_deferred(table)[3]) == (5, 5)
    costs = equal(4, stored_bytes=(10.0,) * 4, input_bytes=1.0, output_bytes=(1.0,) * 4)
    assert simulate(table, costs).peak_bytes[3] == 5 * 20
    again = dataclasses.replace(costs, recompute=(1.0,) * 4)
    assert simulate(table, again).peak_bytes[3] == 5 * (1 + 20)


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
def test_memory_is_that_of_the_live_micro_batches(schedule):
    table = build_table(schedule, chain(4), 8)
    live = peak_live(table)
    stored = (40.0, 30.0, 20.0, 10.0)
    kept = simulate(table, equal(4, stored_bytes=stored))
    assert kept.peak_bytes == [n * size for n, size in zip(live, stored, strict=True)]
    again = equal(
        4,
        recompute=(1.0,) * 4,
        stored_bytes=stored,
        output_bytes=(3.0, 2.0, 1.0, 0.5),
        input_bytes=5.0,
    )
    inputs = (5.0, 3.0, 2.0, 1.0)
    assert simulate(table, again).peak_bytes == [
        n * given + size for n, given, size in zip(live, inputs, stored, strict=True)
    ]


def test_the_memory_of_a_device_is_the_sum_over_its_stages():
    table = build_table("grouped", chain(4, [0, 0, 0, 0]), 8)
    live, worst = {stage: 0 for stage in range(4)}, 0
    for tick in table.ticks:
        (action,) = tick.values()
        live[action.stage] += 1 if action.kind == "forward" else -1
        worst = max(worst, sum(live.values()))
    result = simulate(table, equal(4, stored_bytes=(10.0,) * 4))
    assert result.peak_bytes == [10 * worst]
    assert worst < sum(peak_live(table))  # the peaks of the stages are not simultaneous


# Bounds that hold for any pipeline


@st.composite
def cases(draw):
    stages = draw(stage_layouts())
    count = 2 * stages.num_positions * draw(st.integers(1, 2))
    table = build_table(draw(schedules), stages, count)
    times = st.tuples(*[seconds] * stages.num_stages)
    sizes = st.tuples(*[st.floats(0, 5)] * stages.num_stages)
    costs = Costs(forward=draw(times), backward=draw(times), output_bytes=draw(sizes))
    link = Link(bytes_per_second=draw(st.floats(0.5, 100)), latency_seconds=0.01)
    return table, costs, link


def critical_path(stages, costs):
    """Return the time of a single micro-batch with instant links."""
    there = sum(max(costs.forward[s] for s in group) for group in stages.groups)
    return there + sum(max(costs.backward[s] for s in group) for group in stages.groups)


@settings(deadline=None)
@given(cases(), executions)
def test_no_pipeline_beats_its_critical_path_or_its_busiest_device(case, execution):
    table, costs, link = case
    result = simulate(table, costs, link, execution=execution)
    work = [0.0] * table.stages.num_devices
    for stage, device in enumerate(table.stages.device_of):
        one = costs.forward[stage] + costs.backward[stage]
        work[device] += table.num_micro_batches * one
    assert result.busy_seconds == pytest.approx(work)
    assert result.seconds >= max(work) * (1 - 1e-9)
    assert result.seconds >= critical_path(table.stages, costs) * (1 - 1e-9)
    assert 0 <= result.bubble_fraction < 1
    assert result.seconds == max(span.end for span in result.timeline)


@settings(deadline=None)
@given(cases())
def test_ticks_are_never_faster_than_free_execution(case):
    table, costs, _ = case
    free = simulate(table, costs, execution="free").seconds
    assert free <= simulate(table, costs, execution="ticks").seconds * (1 + 1e-9)


@settings(deadline=None)
@given(cases(), executions)
def test_a_slower_link_is_never_faster(case, execution):
    table, costs, link = case
    at_once = simulate(table, costs, execution=execution).seconds
    assert at_once <= simulate(table, costs, link, execution=execution).seconds * (1 + 1e-9)


@settings(deadline=None)
@given(cases(), executions)
def test_a_device_does_one_thing_at_a_time_in_the_order_of_the_table(case, execution):
    table, costs, link = case
    timeline = simulate(table, costs, link, execution=execution).timeline
    for device in range(table.stages.num_devices):
        own = [span for span in timeline if span.device == device]
        for first, second in itertools.pairwise(own):
            assert first.end <= second.start * (1 + 1e-12)
        planned = [tick[device] for tick in table.ticks if device in tick]
        assert [(s.kind, s.stage, s.micro_batch) for s in own] == planned


@settings(deadline=None)
@given(cases(), executions)
def test_no_pass_starts_before_its_inputs_have_arrived(case, execution):
    table, costs, link = case
    stages = table.stages
    timeline = simulate(table, costs, link, execution=execution).timeline
    end = {(s.kind, s.stage, s.micro_batch): s.end for s in timeline}
    for span in timeline:
        position = stages.position_of(span.stage)
        if span.kind != "forward" or position == 0:
            continue
        for stage in stages.groups[position - 1]:
            apart = stages.device_of[stage] != span.device
            travel = link.seconds(costs.output_bytes[stage]) if apart else 0
            arrived = end["forward", stage, span.micro_batch] + travel
            assert span.start >= arrived * (1 - 1e-12)


def test_costs_for_another_number_of_stages_are_rejected():
    with pytest.raises(ConfigurationError, match="costs for 3 stages; the pipeline has 4"):
        simulate(build_table("grouped", chain(4), 8), equal(3))
