"""How long the devices wait for data: measured, logged, and told once."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from small_runner import batches, make_runner

from millrace.feeds.device import ResidentDataset
from millrace.loop import progress as module
from millrace.loop.progress import InputWait


@pytest.fixture
def wait(monkeypatch):
    """A measurement in which the arrays of a call are the seconds until it is done."""
    monkeypatch.setattr(module, "jax", SimpleNamespace(block_until_ready=time.sleep))
    measured = InputWait()
    measured.start()
    yield measured
    measured.close()


def get_data(wait, seconds, *, newest=None):
    with wait.waiting(newest):
        time.sleep(seconds)


def test_without_a_call_in_flight_all_waiting_counts(wait):
    get_data(wait, 0.2)
    time.sleep(0.2)
    assert wait.take_share() == pytest.approx(0.5, abs=0.25)


def test_data_that_arrives_before_the_call_is_done_was_not_waited_for(wait):
    get_data(wait, 0.1, newest=0.3)
    time.sleep(0.2)
    assert wait.take_share() == 0


def test_only_the_time_after_the_call_is_done_counts(wait):
    get_data(wait, 0.4, newest=0.2)
    assert wait.take_share() == pytest.approx(0.5, abs=0.25)


def test_each_share_is_of_the_time_since_the_last_and_the_total_is_kept(wait):
    get_data(wait, 0.2)
    assert wait.take_share() > 0.6
    time.sleep(0.2)
    assert wait.take_share() == 0
    assert wait.share == pytest.approx(0.5, abs=0.25)


def test_a_moment_says_nothing_and_counts_later(wait):
    get_data(wait, 0.1)
    assert wait.take_share() is None
    time.sleep(0.1)
    assert wait.take_share() == pytest.approx(0.5, abs=0.25)


def test_pauses_are_excluded_even_if_they_fail(wait):
    get_data(wait, 0.25)
    with pytest.raises(OSError), wait.paused():
        time.sleep(0.4)
        raise OSError
    assert wait.take_share() > 0.5


def test_waiting_is_notable_after_a_while_and_above_a_share(wait, monkeypatch):
    monkeypatch.setattr(module, "_NOTICE_SECONDS", 0.15)
    get_data(wait, 0.1)
    assert not wait.is_notable()  # too early
    get_data(wait, 0.1)
    assert wait.is_notable()
    monkeypatch.setattr(module, "_NOTICE_SHARE", 1.0)
    assert not wait.is_notable()


class Slow:
    """Batches that take a while each."""

    advice = "Buy a faster disk."

    def __init__(self, seconds):
        self._seconds = seconds

    def __iter__(self):
        for batch in batches(range(12)):
            time.sleep(self._seconds)
            yield batch


def run(path, dataset):
    runner, state, directory, checkpoints = make_runner(path, dataset)
    warnings = []
    runner._console.warning = warnings.append
    result = runner.run(state)
    checkpoints.close()
    return directory.read_metrics(), result.progress, warnings


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
def test_a_slow_dataset_shows_in_the_log_and_the_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LEAST_SECONDS", 0.02)
    events, progress, warnings = run(tmp_path / "r", Slow(0.05))
    # The last call is drained without more data: there is nothing left to wait for.
    assert all(event["input_wait"] > 0.5 for event in events[:-1])
    assert 0.5 < progress["input_wait"] <= 1
    assert warnings == []  # not long enough to matter


def test_the_warning_appears_once_with_the_advice_of_the_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_NOTICE_SECONDS", 0.1)
    _, _, warnings = run(tmp_path / "r", Slow(0.05))
    (warning,) = warnings
    assert warning.startswith("The devices waited for data ")
    assert "% of the time: the host supplies " in warning
    assert warning.endswith(" samples/s. Buy a faster disk.")


def test_a_dataset_without_advice_gets_a_general_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_NOTICE_SECONDS", 0.1)
    _, _, warnings = run(tmp_path / "r", (batch for batch in Slow(0.05)))
    assert [x.endswith("Prepare the data in advance.") for x in warnings] == [True]


def test_data_on_the_device_is_never_waited_for(tmp_path):
    resident = ResidentDataset(lambda count: jnp.ones((count, 2)))
    events, progress, _ = run(tmp_path / "r", resident)
    assert not any("input_wait" in event for event in events)
    assert progress["input_wait"] == 0
