"""Routes put every value into the slot where it is read and keep it until then."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import schedules

from millrace.program.routes import Routes, plan_routes
from millrace.schedule.stages import place_stages
from millrace.schedule.table import Table, build_table


@st.composite
def tables(draw) -> Table:
    shape = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    shape[-1] = 1
    count = sum(shape)
    devices = draw(st.integers(1, count))
    flat = draw(
        st.lists(st.integers(0, devices - 1), min_size=count, max_size=count).filter(
            lambda used: set(used) == set(range(max(used) + 1))
        )
    )
    rest = iter(flat)
    mapping = [[next(rest) for _ in range(n)] if n > 1 else next(rest) for n in shape]
    schedule = draw(schedules)
    positions = len(shape)
    rounds = draw(st.integers(1, 3))
    return build_table(schedule, place_stages(shape, mapping), 2 * positions * rounds)


@given(tables())
@settings(max_examples=150, deadline=None)
def test_an_action_reads_what_was_sent_for_it(table):
    """Follow the routes with symbolic values: sets of actions."""
    routes, stages = plan_routes(table), table.stages
    devices = range(stages.num_devices)
    received = [
        {slot: set() for slot in range(routes.num_receive_slots + 1)} for _ in devices
    ]
    stored = [dict.fromkeys(range(routes.num_residual_slots)) for _ in devices]
    deferred = [dict.fromkeys(range(routes.num_deferred_slots)) for _ in devices]
    for tick, row in enumerate(table.ticks):
        sent = {}
        for device, (kind, stage, micro) in row.items():
            position = stages.position_of(stage)
            assert routes.branch[tick, device] > 0
            assert routes.micro_batch[tick, device] == micro
            before = stages.groups[position - 1] if position else ()
            read = received[device][routes.input_slot[tick, device]]
            if position:
                assert read == {("forward", s, micro) for s in before}
            slot = routes.residual_slot[tick, device]
            if kind == "forward":
                stored[device][slot] = (stage, micro)
            else:
                assert stored[device][slot] == (stage, micro)
            own = routes.deferred_slot[tick, device]
            if kind == "weights":
                assert deferred[device].pop(own) == (stage, micro)
            elif kind == "backward":
                if table.splits_backward:
                    assert not deferred[device].get(own)
                    deferred[device][own] = (stage, micro)
                if position < len(stages.groups) - 1:
                    read = received[device][routes.gradient_slot[tick, device]]
                    after = stages.groups[position + 1]
                    assert read == {("backward", s, micro) for s in after}
            if kind != "weights":
                sent[device] = (kind, stage, micro)
        deliver(routes, tick, sent, received)


def deliver(routes: Routes, tick: int, sent: dict, received: list) -> None:
    for channel, edges in enumerate(routes.channels):
        sources, targets = zip(*edges, strict=True)
        assert len(set(sources)) == len(edges) == len(set(targets))
        for source, target in edges:
            slot = routes.receive_slot[tick, target, channel]
            if slot == routes.num_receive_slots:
                continue  # nothing arrives
            assert source in sent
            there = (
                received[target][slot]
                if routes.receive_add[tick, target, channel]
                else set()
            )
            received[target][slot] = there | {sent[source]}


def test_a_chain_needs_two_channels_and_few_slots():
    stages = place_stages([1, 1, 1, 1], None)
    table = build_table("interleaved", stages, 16)
    routes = plan_routes(table)
    assert len(routes.channels) == 2
    assert not routes.any_added
    assert routes.num_residual_slots == 4
    assert routes.num_receive_slots <= 6
