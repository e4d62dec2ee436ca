"""The order and the devices of stages, and what is rejected."""

import pytest

from millrace.config import ConfigurationError
from millrace.schedule.stages import Stages, place_stages


def test_each_stage_has_its_own_device_by_default():
    stages = place_stages([1, 2, 1], None)
    assert stages == Stages(((0,), (1, 2), (3,)), (0, 1, 2, 3))
    assert (stages.num_stages, stages.num_positions, stages.num_devices) == (4, 3, 4)


def test_concurrent_stages_use_the_devices_in_their_list():
    stages = place_stages([1, 2, 1, 1], [0, [1, 2], 2, 3])
    assert stages.device_of == (0, 1, 2, 2, 3)
    assert stages.positions == (0, 1, 1, 2, 3)
    assert [stages.position_of(stage) for stage in range(5)] == [0, 1, 1, 2, 3]
    assert stages.num_devices == 4


@pytest.mark.parametrize(
    ("shape", "mapping", "message"),
    [
        ([], None, "at least one stage"),
        ([1, 0], None, "at least one at each position"),
        ([1, 1, 1], [0, 1], "2 entries for 3 positions"),
        ([1, 1], [0, [1]], r"\[1\] at position 1, which has a single stage"),
        ([1, 2], [0, 1], "1 at position 1, which has 2 concurrent stages"),
        ([1, 2], [0, [1, 2, 3]], "a list of 2 devices"),
        ([1, 1, 1], [0, 3, 1], "skips device 2: 3 devices must be numbered 0 to 2"),
        ([1, 1], [1, 2], "skips device 0"),
        ([1, 1], [0, -1], "must have devices 0, 1, 2, …; got -1"),
        ([1, 1], [0, True], "got True"),
        ([1, 1], [0, 0.5], "got 0.5"),
    ],
)
def test_a_mapping_that_does_not_fit_is_rejected_with_a_hint(shape, mapping, message):
    with pytest.raises(ConfigurationError, match=message):
        place_stages(shape, mapping)
