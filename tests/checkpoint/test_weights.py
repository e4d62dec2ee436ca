"""Weights come back from a checkpoint without the model."""

import collections
import dataclasses
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.checkpoint.manifest import CheckpointError, manifest_checksum
from millrace.checkpoint.store import write_checkpoint
from millrace.checkpoint.weights import restore_weights
from millrace.program.step import Weights


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    kernel: Any


def array(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.arange(np.prod(shape), dtype="float32").reshape(shape).astype(dtype)


TREE = {
    "b": (array(2), [array(3), array(1)], (), {}, None),
    "a": {10: array(2, 2), 9: array(4)},
    "odd ']['": collections.OrderedDict(z=array(2), a=array(3)),
    "half": array(4, dtype=jnp.bfloat16),
    "empty": array(0, 3),
    "pair": Pair(array(1), {"x": np.int32(3)}),
}


def save(path, params, model_state=None):
    write_checkpoint(path, Weights(params, model_state), 7, {"epoch": 1.0})
    return path


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


def test_containers_order_types_and_empty_parts_come_back(tmp_path):
    path = save(tmp_path / "update-000000007", TREE, (array(2), {"count": np.int32(5)}))
    params, model_state = restore_weights(path)
    assert_same(params, TREE)
    assert type(params["odd ']['"]) is collections.OrderedDict
    assert_same(model_state, (array(2), {"count": np.int32(5)}))


def test_a_single_array_and_a_random_key_come_back(tmp_path):
    path = save(tmp_path / "update-000000007", array(3), jax.random.key(4))
    params, model_state = restore_weights(path)
    assert_same(params, array(3))
    assert jax.random.key_data(model_state).tolist() == [0, 4]


def test_other_containers_need_an_example(tmp_path):
    path = save(tmp_path / "update-000000007", {"layer": Module(array(3))}, {"n": array(1)})
    with pytest.raises(CheckpointError, match=r"test_weights\.Module.* Pass like="):
        restore_weights(path)
    example = {"layer": Module(jnp.zeros(3))}
    for like in (example, Weights(example, {"n": jnp.zeros(1)})):
        params, model_state = restore_weights(path, like)
        assert_same(params, {"layer": Module(array(3))})
        assert_same(model_state, {"n": array(1)})
    with pytest.raises(CheckpointError, match="does not fit this model"):
        restore_weights(path, {"layer": Module(jnp.zeros(4))})


def test_a_named_tuple_that_has_changed_needs_an_example(tmp_path, monkeypatch):
    path = save(tmp_path / "update-000000007", Pair(array(1), array(2)))
    monkeypatch.setitem(globals(), "Pair", NamedTuple("Pair", [("left", Any)]))
    with pytest.raises(CheckpointError, match=r"test_weights\.Pair"):
        restore_weights(path)


def test_a_checkpoint_of_an_earlier_version_comes_back_as_dictionaries_and_lists(tmp_path):
    tree = {"a'b": (array(2), {"w": array(3)}), "c": [array(1)]}
    path = save(tmp_path / "update-000000007", tree)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["structure"], manifest["checksum"]
    manifest["checksum"] = manifest_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    params, model_state = restore_weights(path)
    assert_same(params, {"a'b": [array(2), {"w": array(3)}], "c": [array(1)]})
    assert model_state is None


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    write_checkpoint(tmp_path / "update-000000001", {"x": array(2)}, 1, {})
    with pytest.raises(CheckpointError, match="no weights of a single model"):
        restore_weights(tmp_path / "update-000000001")
