"""Models of other libraries train as in a loop of their own library.

A training program must give the same weights and state, whether micro-batches come one
after another or on replicas.
"""

import numpy as np
import optax
import pytest
from adapters_matrix import (
    CASES,
    EQUINOX_MODES,
    check_same,
    make_case,
    make_data,
    run_own_loop,
    run_program,
    sorted_arrays,
)

NETWORKS = [
    *((library, kind) for library in CASES for kind in ("batch norm", "dropout")),
    *(("equinox", kind) for kind in EQUINOX_MODES if kind != "batch norm"),
]
PLANS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_count": 4},
    "replicas": {"num_replicas": 2},
}


@pytest.mark.devices(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("library", "kind"), NETWORKS)
def test_a_model_trains_as_in_its_own_library(library, kind, plan):
    case, options = make_case(library, kind), PLANS[plan]
    data = make_data(int(np.prod([1, *options.values()])))
    optimizer = optax.sgd(0.05, momentum=0.9)
    params, model_state = run_own_loop(case, data, optimizer)
    state, _ = run_program(case, data, optimizer, **options)
    check_same(state.params, params)
    check_same(state.model_state, model_state)
    assert max(np.abs(x).max() for x in sorted_arrays(state.params)) < 1e3
