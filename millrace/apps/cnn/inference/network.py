"""A network compiled for inference: for throughput, and for latency.

For throughput, one call processes many batches that are on the devices, and their logits
are read while the next call runs. For latency, a call takes one batch; on a GPU, the
weights are constants of the program. In both cases weights are folded and cast in advance
and stored in the layout that the compiled program wants, so that a call only runs the
network.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.nn.folding import SMALL_BATCH, add_transformed, fold, has_depthwise
from millrace.nn.layers import Layer, apply_layers
from millrace.program.compiling import active_options, compile_for, no_persistent_cache
from millrace.program.mixed_precision import narrow
from millrace.program.replicas import REPLICA_AXIS, replica_mesh, replicated
from millrace.program.step import Weights
from millrace.program.update_loop import repeat_update

# The network is one CUDA graph, so that the host does not launch hundreds of kernels:
# ResNeXt-101 takes 0.66 ms for four images on an H200 instead of 1.14.
_GRAPH_OPTIONS = {
    "gpu": {
        "xla_gpu_enable_command_buffer": (
            # the default of XLA, and convolutions
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION"
        ),
        # cuDNN can record a convolution in a graph only after running it once, which it has
        # if XLA autotuned it in this process. So neither the program nor autotuning results
        # may come from a cache, and deterministic programs, which XLA does not autotune,
        # get no graph: see _compile.
        "xla_gpu_per_fusion_autotune_cache_dir": "",
    }
}
# Fusing depthwise convolutions with what surrounds them saves kernels: with many batches,
# 32 images of EfficientNet-B0 take 1.19 ms instead of 1.39. Fused convolutions cannot be
# part of a graph, so a call with one batch is slower: 0.88 ms per image instead of 0.62.
_FUSION_OPTIONS = {"gpu": {"xla_gpu_experimental_enable_conv_fusion": True}}

_BY_SAMPLE = PartitionSpec(REPLICA_AXIS)
_BY_BATCH = PartitionSpec(None, REPLICA_AXIS)


class Network(NamedTuple):
    """Layers with their weights."""

    layers: list[Layer]
    weights: Weights

    def apply(
        self,
        weights: Any,
        x: jax.Array,  # (batch, height, width, channels)
    ) -> jax.Array:
        """Return the logits of preprocessed images with these `weights`."""
        params, model_state = weights
        logits, _ = apply_layers(self.layers, params, model_state, x, training=False)
        return logits


def build_network(
    config: ValidateConfig,
    image_shape: tuple[int, int, int],
    model: list[Layer],
    weights: Weights,
) -> Network:
    """Return the network as it runs: batch norm folded, weights in the compute type."""
    params, model_state = weights
    if config.fold_batch_norm:
        example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
        model, params, model_state = fold(model, params, model_state, example)
    dtype = jnp.dtype(config.train_config.plan.types.compute)
    params = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)
    if dtype == jnp.float32:
        params = add_transformed(model, params)
    return Network(model, Weights(params, model_state))


class Inference:
    """A network compiled for batches of one size.

    Args:
        network: The network.
        preprocess: Preprocesses images on the device: ``(images, None)``.
        batch: Shape and type of a batch over all replicas, as it arrives.
        num_replicas: Devices that share a batch.
        compute: The compute type.
    """

    def __init__(
        self,
        network: Network,
        preprocess: Any,
        batch: jax.ShapeDtypeStruct,
        *,
        num_replicas: int = 1,
        compute: str = "float32",
    ) -> None:
        self.batch = batch
        self.compile_seconds = 0.0
        self.programs: dict[str, jax.stages.Compiled] = {}
        self.network = network
        self._preprocess, self._compute = preprocess, compute
        # Local devices only: processes that run together do not share batches.
        self._mesh = replica_mesh(num_replicas, jax.local_devices())
        self._weights: Any = None
        self._passed: tuple[Any, ...] = ()
        self._num_batches = 0

    @property
    def devices(self) -> list[Any]:
        """The devices of the replicas."""
        return list(self._mesh.devices.flat)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch: samples over replicas."""
        return NamedSharding(self._mesh, _BY_SAMPLE)

    @property
    def chunk_sharding(self) -> NamedSharding:
        """The sharding of several batches."""
        return NamedSharding(self._mesh, _BY_BATCH)

    def compile_one(self) -> None:
        """Compile the program for one batch."""
        constants = jax.tree.map(np.asarray, self.network.weights)

        def one(*arguments: Any) -> jax.Array:
            weights = arguments[0] if self._is_on_cpu else constants
            return self._logits(jax.tree.map(jnp.asarray, weights), arguments[-1])

        spec = self._spec((), self.batch_sharding)
        # As arguments, the host would pass hundreds of arrays in every call to a GPU: one
        # image of ResNet-50 would take 0.81 ms on an H200 instead of 0.49. As constants,
        # XLA:CPU does not align them: eight images of ResNet-18 with 128 pixels would take
        # 45 ms on a core instead of 32.
        passed = [jax.tree.map(_describe, constants)] if self._is_on_cpu else []
        mapped = self._shard_map(
            one, (*[PartitionSpec() for _ in passed], _BY_SAMPLE), _BY_SAMPLE
        )
        everywhere = [replicated(self._mesh) for _ in passed]
        self._compile(
            "one",
            mapped,
            *passed,
            spec,
            preferred=_GRAPH_OPTIONS,
            in_shardings=(*everywhere, spec.sharding),
        )

    @property
    def _is_on_cpu(self) -> bool:
        return self._mesh.devices.flat[0].platform == "cpu"

    @property
    def takes_any_number(self) -> bool:
        """Whether the program for many batches can be called for fewer."""
        return self._is_on_cpu

    def compile_many(self, num_distinct: int, num_batches: int) -> None:
        """Compile the program for `num_batches`, cycling through `num_distinct` batches."""
        self._num_batches = num_batches

        def many(
            weights: Any,
            chunk: jax.Array,  # (distinct, batch, height, width, channels)
            *part: jax.Array,  # the first batch and their number, by default all
        ) -> jax.Array:
            @jax.jit  # traced only once
            def one(_: None, number: jax.Array) -> tuple[None, jax.Array]:
                place = number % num_distinct
                images = lax.dynamic_index_in_dim(chunk, place, keepdims=False)
                return None, self._logits(weights, images)

            return repeat_update(one, None, jnp.arange(num_batches), *part)[1]

        spec = self._spec((num_distinct,), self.chunk_sharding)
        weights = self.network.weights
        shapes = jax.tree.map(_describe, weights)
        # XLA chooses the layout of weights: GPU convolutions prefer another than ours.
        weight_format = Format(Layout.AUTO, replicated(self._mesh))
        part = (self._place_part(0, num_batches),) if self.takes_any_number else ()
        specs = (PartitionSpec(), _BY_BATCH, *[PartitionSpec() for _ in part])
        mapped = self._shard_map(many, specs, _BY_BATCH)
        is_small = self.batch.shape[0] // self._mesh.size <= SMALL_BATCH
        fuses = is_small and has_depthwise(self.network.layers, weights.params)
        self._compile(
            "many",
            mapped,
            shapes,
            spec,
            *part,
            preferred=_FUSION_OPTIONS if fuses else _GRAPH_OPTIONS,
            in_shardings=(weight_format, spec.sharding, *[x.sharding for x in part]),
        )

    def one(self, images: jax.Array) -> jax.Array:
        """Start on a batch that is on the devices; return its logits as a future."""
        return self.programs["one"](*self._passed, images)

    def many(self, chunk: jax.Array, part: tuple[int, int] | None = None) -> jax.Array:
        """Start on many batches; return logits (batches, samples, classes) as a future.

        Args:
            chunk: The batches to cycle through.
            part: The first batch and how many to process, if the program takes any number;
                the other logits are 0.
        """
        if not self.takes_any_number:
            return self.programs["many"](self._weights, chunk)
        placed = self._place_part(*(part or (0, self._num_batches)))
        return self.programs["many"](self._weights, chunk, placed)

    def _place_part(self, first: int, count: int) -> jax.Array:
        return jax.device_put(np.array([first, count], np.int32), replicated(self._mesh))

    def place_weights(self) -> None:
        """Put the weights on the devices as the compiled programs take them."""
        if "one" in self.programs and self._is_on_cpu:
            self._passed = (self.replicate(self.network.weights),)
        if many := self.programs.get("many"):
            layouts = many.input_formats[0][0]
            self._weights = jax.device_put(self.network.weights, layouts)

    def replicate(self, weights: Weights) -> Weights:
        """Put weights on every device in the default layout."""
        return jax.device_put(weights, replicated(self._mesh))

    def release(self) -> None:
        """Free the weights on the devices."""
        self._weights, self._passed = None, ()

    def _logits(self, weights: Any, images: jax.Array) -> jax.Array:
        images = narrow(self._preprocess(images, None), self._compute)
        return self.network.apply(weights, images)

    def _spec(self, leading: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
        shape = (*leading, *self.batch.shape)
        return jax.ShapeDtypeStruct(shape, self.batch.dtype, sharding=sharding)

    def _shard_map(self, function: Any, in_specs: Any, out_specs: PartitionSpec) -> Any:
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _compile(self, name: str, *arguments: Any, **options: Any) -> None:
        started = time.perf_counter()
        if active_options("gpu").get("xla_gpu_deterministic_ops"):
            options["preferred"] = {}
        # Not cached: see _GRAPH_OPTIONS. Also, "one" is as large as the weights.
        with no_persistent_cache():
            self.programs[name] = compile_for(self._mesh, *arguments, **options)
        self.compile_seconds += time.perf_counter() - started


def _describe(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def time_calls(inference: Inference, batches: Sequence[Any], calls: int) -> Iterator[float]:
    """Time calls for one batch each, in seconds, from the call until the logits are ready.

    The calls cycle through the batches. Batches on the devices stay there, and so do their
    logits; others are sent, and their logits are fetched.
    """
    for number, batch in zip(range(calls + 1), itertools.cycle(batches), strict=False):
        started = time.perf_counter()
        if isinstance(batch, jax.Array):
            inference.one(batch).block_until_ready()
        else:
            sent = jax.device_put(batch, inference.batch_sharding)
            jax.device_get(inference.one(sent))
        if number:  # the first call is a warmup
            yield time.perf_counter() - started


def run_chunks(
    inference: Inference, chunks: Iterable[tuple[Any, Any]]
) -> Iterator[np.ndarray]:
    """Run parts of chunks; yield the logits of one while the next is computed."""
    previous = None
    for chunk, part in chunks:
        logits = inference.many(chunk, part)
        if previous is not None:
            yield np.asarray(previous)
        previous = logits
    if previous is not None:
        yield np.asarray(previous)
