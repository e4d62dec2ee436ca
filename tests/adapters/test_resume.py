"""A stopped and resumed run of an adapted model gives the weights of a whole run."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
import pytest
from adapters_matrix import CASES, FEATURES, make_case

import millrace as mr
from millrace.loop.event_schedule import schedule_events
from millrace.run.run import run_command

INTERRUPTED = 130
X = np.random.default_rng(1).standard_normal((96, FEATURES)).astype(np.float32)
SAMPLES = mr.ArraySource({"x": X, "y": np.abs(X).sum(1, keepdims=True)})
SCHEDULE = schedule_events(
    updates_per_epoch=6, num_epochs=1, events_per_epoch={"log": 3, "checkpoint": 3}
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the run."""

    plan: mr.Plan = mr.Plan(micro_batch_size=8, gradient_accumulation_count=2)
    run: mr.RunOptions = mr.RunOptions()


class Stop(mr.Callback):
    """Ends a run after its first log event."""

    def on_log(self, event):
        return True


def train(path, case, *callbacks, resume=False):
    """Train as a command does; return its status and the last state."""
    states = []

    def work(config, run):
        program = mr.training_program(case.model.loss_fn, optax.adam(0.01), config.plan)
        batches = mr.Stream(SAMPLES, config.plan.batching.samples_per_step)
        with run.checkpoints() as checkpoints:
            state = run.train(
                program,
                program.init(case.model.params, case.model.model_state),
                mr.Infeed(batches),
                SCHEDULE,
                checkpoints=checkpoints,
                callbacks=callbacks,
            )
        states.append(jax.device_get(state))

    config = Config(run=mr.RunOptions(run_dir=path, resume=resume, quiet=True))
    status = run_command(work, config, command="adapted", command_line="adapted")
    return status, states[0]


@pytest.mark.parametrize(
    ("library", "kind"),
    [*((library, "batch norm") for library in CASES), ("equinox", "ema batch norm")],
)
def test_a_resumed_run_has_the_weights_and_averages_of_a_whole_run(library, kind, tmp_path):
    case = make_case(library, kind)
    assert jax.tree.leaves(case.model.model_state)
    status, whole = train(tmp_path / "whole", case)
    assert status == 0
    stopped = train(tmp_path / "parts", case, Stop())
    assert stopped[0] == INTERRUPTED
    status, resumed = train(tmp_path / "parts", case, resume=True)
    assert status == 0
    assert int(resumed.update) == int(whole.update) == 6 > int(stopped[1].update)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
