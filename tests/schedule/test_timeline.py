"""How devices are used, from a predicted or measured timeline."""

import pytest

from millrace.schedule.simulate import Costs, simulate
from millrace.schedule.stages import place_stages
from millrace.schedule.table import build_table, peak_live
from millrace.schedule.timeline import Span, device_uses, idle_share

MEASURED = [
    Span(0, 10.0, 11.0, "forward", 0, 0),
    Span(0, 14.0, 16.0, "backward", 0, 0),
    Span(0, 14.5, 15.0, "all_reduce", 0),  # measured spans may be nested or overlap
    Span(0, 15.5, 17.0, "update", 0),
    Span(1, 11.5, 12.0, "forward", 1, 0),
    Span(1, 12.0, 13.5, "backward", 1, 0),
]


def test_idle_time_is_what_no_span_covers():
    first, second = device_uses(MEASURED)
    assert first.idle == [(11.0, 14.0)]
    assert second.idle == [(10.0, 11.5), (13.5, 17.0)]
    assert (first.idle_seconds, second.idle_seconds) == (3, 5)
    assert (first.seconds, second.seconds) == (7, 7)
    assert idle_share([first, second]) == pytest.approx(8 / 14)


def test_micro_batches_are_held_from_forward_to_backward():
    (use,) = device_uses(
        [
            Span(0, 0, 1, "forward", 3, 0),
            Span(0, 1, 2, "forward", 3, 1),
            Span(0, 2, 3, "backward", 3, 0),
            Span(0, 3, 4, "forward", 3, 2),  # starts when another is released
            Span(0, 4, 5, "backward", 3, 1),
            Span(0, 5, 6, "backward", 3, 2),
        ]
    )
    assert use.held == {3: 2}


def test_inference_holds_nothing():
    (use,) = device_uses([Span(0, 0, 1, "forward", 0, n) for n in range(3)])
    assert use.held == {0: 0}


@pytest.mark.parametrize("schedule", ["grouped", "interleaved", "sequential"])
@pytest.mark.parametrize("mapping", [None, [0, 1, 1, 0]])
def test_a_simulated_timeline_agrees_with_its_table(schedule, mapping):
    table = build_table(schedule, place_stages([1] * 4, mapping), 16)
    result = simulate(table, Costs(forward=(1.0,) * 4, backward=(2.0,) * 4))
    uses = device_uses(result.timeline)
    held = {stage: held for use in uses for stage, held in use.held.items()}
    assert [held[stage] for stage in range(4)] == peak_live(table)
    assert [use.idle_seconds for use in uses] == pytest.approx(result.idle_seconds)
    assert idle_share(uses) == pytest.approx(result.bubble_fraction)
