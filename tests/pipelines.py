"""Random pipelines for property tests."""

from hypothesis import strategies as st

from millrace.schedule.stages import Stages, place_stages
from millrace.schedule.table import SCHEDULES


@st.composite
def stage_layouts(draw) -> Stages:
    """Draw up to 6 positions of up to 3 stages, on any devices."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    if draw(st.booleans()):
        return place_stages(shape, None)
    wanted = draw(st.lists(st.integers(0, 5), min_size=sum(shape), max_size=sum(shape)))
    number = {device: index for index, device in enumerate(sorted(set(wanted)))}
    devices = iter([number[device] for device in wanted])
    mapping = [
        next(devices) if count == 1 else [next(devices) for _ in range(count)]
        for count in shape
    ]
    return place_stages(shape, mapping)


schedules = st.sampled_from(sorted(SCHEDULES))
