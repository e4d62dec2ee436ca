"""Routes bring every value to the slot where it is read, and keep it until then."""

from hypothesis import given, settings
from hypothesis import strategies as st

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
    schedule = draw(st.sampled_from(["grouped", "interleaved", "sequential"]))
    positions = len(shape)
    rounds = draw(st.integers(1, 3))
    return build_table(schedule, place_stages(shape, mapping), 2 * positions * rounds)


@given(tables())
@settings(max_examples=150, deadline=None)
def test_what_an_action_reads_is_what_was_sent_for_it(table):
    """Follow the routes with names for values: a slot holds a set of (who, what)."""
    routes, stages = plan_routes(table), table.stages
    devices = range(stages.num_devices)
    mail = [{slot: set() for slot in range(routes.num_mail_slots + 1)} for _ in devices]
    kept = [dict.fromkeys(range(routes.num_residual_slots)) for _ in devices]
    for tick, row in enumerate(table.ticks):
        sent = {}
        for device, (kind, stage, micro) in row.items():
            position = stages.position_of(stage)
            assert routes.branch[tick, device] > 0
            assert routes.micro_batch[tick, device] == micro
            before = stages.groups[position - 1] if position else ()
            read = mail[device][routes.input_slot[tick, device]]
            if position:
                assert read == {("forward", s, micro) for s in before}
            slot = routes.residual_slot[tick, device]
            if kind == "forward":
                kept[device][slot] = (stage, micro)
            else:
                assert kept[device][slot] == (stage, micro)
                if position < len(stages.groups) - 1:
                    read = mail[device][routes.gradient_slot[tick, device]]
                    after = stages.groups[position + 1]
                    assert read == {("backward", s, micro) for s in after}
            sent[device] = (kind, stage, micro)
        deliver(routes, tick, sent, mail)


def deliver(routes: Routes, tick: int, sent: dict, mail: list) -> None:
    for channel, edges in enumerate(routes.channels):
        sources, targets = zip(*edges, strict=True)
        assert len(set(sources)) == len(edges) == len(set(targets))
        for source, target in edges:
            slot = routes.mail_slot[tick, target, channel]
            if slot == routes.num_mail_slots:
                continue  # nothing comes
            assert source in sent
            there = mail[target][slot] if routes.mail_add[tick, target, channel] else set()
            mail[target][slot] = there | {sent[source]}


def test_a_chain_needs_two_channels_and_few_slots():
    stages = place_stages([1, 1, 1, 1], None)
    table = build_table("interleaved", stages, 16)
    routes = plan_routes(table)
    assert len(routes.channels) == 2
    assert not routes.any_added
    assert routes.num_residual_slots == 4
    assert routes.num_mail_slots <= 6
