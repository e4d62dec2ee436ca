"""A network compiled for inference: for throughput, and for latency.

For throughput one call goes over many batches that lie on the devices, and their logits
are read while the next call runs. For latency a call takes one batch, and the weights are
part of the program. In both, weights are folded and narrowed beforehand, and lie in memory
the way the compiled program wants them, so that a call does nothing but run the network.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from millrace.nn.folding import SMALL_BATCH, fold, has_depthwise
from millrace.nn.layers import Layer, Tree, apply_layers
from millrace.program.compiling import active_options, compile_for, no_persistent_cache
from millrace.program.mixed_precision import narrow
from millrace.program.replicas import REPLICA_AXIS, replica_mesh, replicated

# A network is one CUDA graph, so that the host need not start each of some hundred kernels:
# ResNeXt-101 takes 0.66 ms for four images on an H200 instead of 1.14.
_GRAPH_OPTIONS = {
    "gpu": {
        "xla_gpu_enable_command_buffer": (
            # what XLA has in graphs by itself, and convolutions
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION"
        ),
        # cuDNN must have run a convolution before it can be recorded in a graph, which it
        # has where XLA timed it. A program or timings of an earlier process would fail, and
        # so would a deterministic program, for which XLA times nothing: see _compile.
        "xla_gpu_per_fusion_autotune_cache_dir": "",
    }
}
# Depthwise ones are joined with what is around them, which makes fewer kernels: 1.19 ms
# for 32 images of EfficientNet-B0 instead of 1.39, of many batches. They are not part of a
# graph then, and a call with one batch takes longer: 0.88 ms for an image instead of 0.62.
_JOINED_OPTIONS = {"gpu": {"xla_gpu_experimental_enable_conv_fusion": True}}

_BY_SAMPLE = PartitionSpec(REPLICA_AXIS)
_BY_BATCH = PartitionSpec(None, REPLICA_AXIS)


class Network(NamedTuple):
    """Layers with their weights, ready to be run."""

    layers: list[Layer]
    params: Tree
    model_state: Tree

    def apply(self, weights: Any, x: jax.Array) -> jax.Array:
        """Return the logits of prepared images under these `weights`."""
        params, model_state = weights
        logits, _ = apply_layers(self.layers, params, model_state, x, training=False)
        return logits


def network_of(
    model: list[Layer],
    params: Tree,
    model_state: Tree,
    image_shape: tuple[int, ...],
    *,
    folded: bool,
    compute: str,
) -> Network:
    """Return a model with the weights that it computes with, batch norm folded or not."""
    if folded:
        example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
        model, params, model_state = fold(model, params, model_state, example)
    params = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(compute)), params)
    return Network(model, params, model_state)


class Placed(NamedTuple):
    """Weights and model state, where an evaluation looks for them."""

    params: Tree
    model_state: Tree


class Inference:
    """A network compiled for batches of one size.

    Args:
        network: What to run.
        prepare: What the device does to images first: ``(images, None)``.
        batch: Shape and type of a batch over all replicas, as it arrives.
        num_replicas: Devices that each take a part of a batch.
        compute: The type of computation.
    """

    def __init__(
        self,
        network: Network,
        prepare: Any,
        batch: jax.ShapeDtypeStruct,
        *,
        num_replicas: int = 1,
        compute: str = "float32",
    ) -> None:
        self.batch = batch
        self.compile_seconds = 0.0
        self.programs: dict[str, jax.stages.Compiled] = {}
        self.network = network
        self._prepare, self._compute = prepare, compute
        # Of this process alone: several that were started together do not mix batches.
        self._mesh = replica_mesh(num_replicas, jax.local_devices())
        self._weights: Any = None

    @property
    def devices(self) -> list[Any]:
        """The devices that work."""
        return list(self._mesh.devices.flat)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Where a batch must lie: its samples split over the replicas."""
        return NamedSharding(self._mesh, _BY_SAMPLE)

    @property
    def chunk_sharding(self) -> NamedSharding:
        """Where several batches must lie."""
        return NamedSharding(self._mesh, _BY_BATCH)

    def compile_one(self) -> None:
        """Compile what takes one batch."""
        # The host would hand over some hundred arrays at every call: 0.81 ms for a picture
        # of ResNet-50 instead of 0.49 on an H200.
        constants = jax.tree.map(
            np.asarray, (self.network.params, self.network.model_state)
        )

        def one(images: jax.Array) -> jax.Array:
            return self._logits(jax.tree.map(jnp.asarray, constants), images)

        spec = self._spec((), self.batch_sharding)
        mapped = self._mapped(one, (_BY_SAMPLE,), _BY_SAMPLE)
        self._compile(
            "one", mapped, spec, preferred=_GRAPH_OPTIONS, in_shardings=(spec.sharding,)
        )

    def compile_many(self, num_distinct: int, num_batches: int) -> None:
        """Compile what takes `num_batches`, going round over `num_distinct` of them."""

        def many(weights: Any, chunk: jax.Array) -> jax.Array:
            def one(number: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
                place = number % num_distinct
                images = lax.dynamic_index_in_dim(chunk, place, keepdims=False)
                return number + 1, self._logits(weights, images)

            return lax.scan(one, jnp.int32(0), None, length=num_batches)[1]

        spec = self._spec((num_distinct,), self.chunk_sharding)
        given = self.network.params, self.network.model_state
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        # XLA chooses how weights lie: on GPU, convolutions want them otherwise than we.
        weights = Format(Layout.AUTO, replicated(self._mesh))
        mapped = self._mapped(many, (PartitionSpec(), _BY_BATCH), _BY_BATCH)
        is_small = self.batch.shape[0] // self._mesh.size <= SMALL_BATCH
        joins = is_small and has_depthwise(self.network.layers, self.network.params)
        self._compile(
            "many",
            mapped,
            shapes,
            spec,
            preferred=_JOINED_OPTIONS if joins else _GRAPH_OPTIONS,
            in_shardings=(weights, spec.sharding),
        )

    def one(self, images: jax.Array) -> jax.Array:
        """Start on a batch that lies on the devices; return its logits to be."""
        return self.programs["one"](images)

    def many(self, chunk: jax.Array) -> jax.Array:
        """Start on many batches; return their logits to be, (batches, samples, ...)."""
        return self.programs["many"](self._weights, chunk)

    def place_weights(self) -> None:
        """Put the weights on the devices, as the program for many batches wants them."""
        if many := self.programs.get("many"):
            weights = self.network.params, self.network.model_state
            self._weights = jax.device_put(weights, many.input_formats[0][0])

    def placed(self, params: Tree, model_state: Tree) -> "Placed":
        """Put weights on every device as they are."""
        everywhere = replicated(self._mesh)
        return Placed(*jax.device_put((params, model_state), everywhere))

    def release(self) -> None:
        """Take the weights off the devices."""
        self._weights = None

    def _logits(self, weights: Any, images: jax.Array) -> jax.Array:
        images = narrow(self._prepare(images, None), self._compute)
        return self.network.apply(weights, images)

    def _spec(self, leading: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
        shape = (*leading, *self.batch.shape)
        return jax.ShapeDtypeStruct(shape, self.batch.dtype, sharding=sharding)

    def _mapped(self, function: Any, given: Any, result: PartitionSpec) -> Any:
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=given, out_specs=result, check_vma=False
        )

    def _compile(self, name: str, *what: Any, **options: Any) -> None:
        started = time.perf_counter()
        if active_options("gpu").get("xla_gpu_deterministic_ops"):
            options["preferred"] = {}
        with (
            no_persistent_cache()
        ):  # see _GRAPH_OPTIONS; and "one" is as large as the weights
            self.programs[name] = compile_for(self._mesh, *what, **options)
        self.compile_seconds += time.perf_counter() - started


def latencies(inference: Inference, images: Any, calls: int) -> Iterator[float]:
    """Time calls for one batch each, in seconds, from the call until the logits are there.

    Images that lie on the devices stay there, and so do their logits; others are sent,
    and their logits fetched. A list of batches is gone round over.
    """
    batches = images if isinstance(images, list) else [images]
    for number, batch in zip(range(calls + 1), itertools.cycle(batches), strict=False):
        started = time.perf_counter()
        if isinstance(batch, jax.Array):
            inference.one(batch).block_until_ready()
        else:
            sent = jax.device_put(batch, inference.batch_sharding)
            jax.device_get(inference.one(sent))
        if number:  # the first fills caches
            yield time.perf_counter() - started


def drain(inference: Inference, chunks: Iterator[Any]) -> np.ndarray | None:
    """Run many batches after many, reading the logits of some while others are made.

    Returns:
        The last logits, on the host.
    """
    before, fetched = None, None
    for chunk in chunks:
        logits = inference.many(chunk)
        fetched = _fetch(before)
        before = logits
    return fetched if before is None else _fetch(before)


def _fetch(logits: jax.Array | None) -> np.ndarray | None:
    return None if logits is None else np.asarray(logits)
