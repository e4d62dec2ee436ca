"""A small training problem and a plain loop that solves it: the oracle of the tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.plan import Plan
from millrace.program.training import TrainingProgram, training_program

UPDATES, GLOBAL_BATCH, FEATURES, CLASSES = 3, 32, 12, 5


def rounding() -> float:
    """Return how much the order of float32 sums may change values of order 1.

    On a GPU, every program sums in blocks of its own, the plain loop included.
    """
    return 1e-6 if jax.default_backend() == "cpu" else 2e-6


def make_params() -> dict[str, Any]:
    """Return three layers; the state of the middle one is large enough to be offloaded."""
    sizes = [(FEATURES, 40), (40, 40), (40, CLASSES)]
    keys = jax.random.split(jax.random.key(7), len(sizes))
    return {
        f"layer{i}": {
            "kernel": jax.random.normal(key, size) * size[0] ** -0.5,
            "bias": jnp.zeros(size[1]),
        }
        for i, (key, size) in enumerate(zip(keys, sizes, strict=True))
    }


def make_model_state() -> dict[str, jax.Array]:
    return {"mean": jnp.zeros(FEATURES)}


def make_data(seed: int = 0) -> dict[str, np.ndarray]:
    """Return leaves (updates, samples of a global batch, ...)."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((UPDATES, GLOBAL_BATCH, FEATURES)).astype(np.float32),
        "y": rng.integers(0, CLASSES, (UPDATES, GLOBAL_BATCH)).astype(np.int32),
    }


def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
    """Return the cross-entropy and, like batch norm, a moving mean of the inputs."""
    del key
    h = batch["x"]
    for layer in params.values():
        h = h @ layer["kernel"] + layer["bias"]
        if layer["bias"].shape != (CLASSES,):
            h = jnp.tanh(h)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        h.astype(jnp.float32), batch["y"]
    )
    seen = batch["x"].astype(jnp.float32).mean(0)
    model_state = {"mean": 0.9 * model_state["mean"] + 0.1 * seen}
    correct = (h.argmax(-1) == batch["y"]).astype(jnp.float32).mean()
    return losses.mean(), (model_state, {"accuracy": correct})


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def plain_loop(
    optimizer: optax.GradientTransformation, data: dict[str, np.ndarray]
) -> tuple[Any, Any, list[float]]:
    """Train on one device, one update at a time, without any code of millrace."""
    params, model_state = make_params(), make_model_state()
    state, losses = optimizer.init(params), []

    @jax.jit
    def step(params: Any, model_state: Any, state: Any, batch: Any) -> Any:
        function = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (model_state, _)), gradient = function(params, model_state, batch, None)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), model_state, state, loss

    for update in range(UPDATES):
        batch = {name: jnp.asarray(leaf[update]) for name, leaf in data.items()}
        params, model_state, state, loss = step(params, model_state, state, batch)
        losses.append(float(loss))
    return params, model_state, losses


def train_with(
    plan: Plan,
    *,
    optimizer: optax.GradientTransformation | None = None,
    loss: Any = loss_fn,
    data: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> tuple[Any, dict[str, np.ndarray], TrainingProgram]:
    """Train the same problem with a training program; return state, info, program."""
    data = make_data() if data is None else data
    program = training_program(loss, optimizer or make_optimizer(), plan, **options)
    state = program.init(make_params(), make_model_state(), seed=3)
    chunk = stage(program, data)
    state, info = program.run(state, chunk)
    return state, {name: np.asarray(value) for name, value in info.items()}, program


def stage(program: TrainingProgram, data: dict[str, np.ndarray]) -> Any:
    """Split global batches into micro-batches and put them on the devices."""
    step = program.plan.batching.samples_per_step
    chunk = {name: x.reshape(-1, step, *x.shape[2:]) for name, x in data.items()}
    return jax.device_put(chunk, program.chunk_sharding)


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest absolute difference between two trees."""
    differences = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max(),
        jax.device_get(one),
        jax.device_get(other),
    )
    return float(max(jax.tree.leaves(differences)))


def run_scalar(weight, slope, plan, *, updates=1, learning_rate=1.0):
    """Minimize slope x weight; the gradient is `slope`."""

    def loss(params, model_state, batch, key):
        # The root of the slope, twice: the gradient must underflow, not the batch.
        product = (params["w"] * batch[:1] * batch[:1]).sum()
        return product, (model_state, {"product": product})

    program = training_program(loss, optax.sgd(learning_rate), plan)
    state = program.init({"w": jnp.full(1, weight, jnp.float32)})
    count = updates * plan.batching.gradient_accumulation_count
    chunk = jax.device_put(
        np.full((count, plan.batching.samples_per_step), np.sqrt(slope), np.float32),
        program.chunk_sharding,
    )
    return program.run(state, chunk)
