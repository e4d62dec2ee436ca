"""Evaluation in several processes, whose clocks differ."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import as_processes

from millrace.data.source import ArraySource
from millrace.data.stream import EvaluationBatches
from millrace.distributed import coordination
from millrace.distributed.progress import own_activity
from millrace.loop.evaluate import _sum_metrics
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram
from millrace.program.step import Weights


class SlowProgram(EvaluationProgram):
    """Takes longer in process 1, and records what it is asked for."""

    def __init__(self, metric_fn, plan):
        super().__init__(metric_fn, plan)
        self.parts = []

    def sum_batches(self, state, chunk, part=None):
        self.parts.append(part)
        time.sleep(0.15 * coordination.process_id())
        return super().sum_batches(state, chunk, part)


@pytest.mark.cpu("a GPU evaluates whole chunks")
def test_processes_that_share_a_program_make_calls_of_the_same_length():
    def metric_fn(params, model_state, batch):
        return {"x": params["a"] * batch["x"]}

    batches = EvaluationBatches(ArraySource({"x": np.arange(40, dtype=np.float32)}), 2)
    weights = Weights({"a": jnp.float32(2.0)}, {})

    def work(rank):
        program = SlowProgram(metric_fn, Plan())
        sums = _sum_metrics(program, weights, batches, 20, is_local=False)
        return program.parts, sums

    before = own_activity().steps
    (parts, sums), (other_parts, other_sums) = as_processes(2, work)
    assert parts == other_parts and len(parts) < 20
    # Whoever waits for data has staged fewer parts than the others, and is named.
    assert own_activity().steps == before + 2 * len(parts)
    assert sums == other_sums == {"count": 40, "x": 2 * sum(range(40))}
