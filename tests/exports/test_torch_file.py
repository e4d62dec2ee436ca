"""State dicts of PyTorch, written without it."""

import pickle
import zipfile

import numpy as np
import pytest

import millrace as mr
from millrace.exports.torch_file import write_state_dict

ARRAYS = {
    "conv.weight": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "norm.num_batches_tracked": np.asarray(7, np.int64),
    "empty": np.zeros((0, 3), np.float32),
    "half": np.arange(4).astype(np.float16),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "big-endian": np.arange(3, dtype=">i4"),
    "is_known": np.array([True, False]),
    "größe": np.arange(3, dtype=np.uint8),
}
KINDS = {"Float": "f4", "Long": "i8", "Half": "f2", "Double": "f8", "Int": "i4",
         "Bool": "?", "Byte": "u1"}  # fmt: skip


def test_torch_loads_every_type_and_shape_without_running_code(tmp_path):
    torch = pytest.importorskip("torch")
    write_state_dict(path := tmp_path / "model.pt", ARRAYS)
    for options in ({}, {"mmap": True}):
        found = torch.load(path, weights_only=True, **options)
        assert list(found) == list(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name].numpy(), array)
            assert found[name].numpy().dtype == array.dtype.newbyteorder("=")


class Unpickler(pickle.Unpickler):
    """Follows the documented format of ``torch.save`` with NumPy arrays."""

    def __init__(self, archive):
        super().__init__(archive.open("model/data.pkl"))
        self.archive = archive

    def find_class(self, module, name):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self.rebuild
        if module == "torch":
            return np.dtype(KINDS[name.removesuffix("Storage")])
        return super().find_class(module, name)

    def persistent_load(self, pid):
        tag, dtype, key, device, size = pid
        assert (tag, device) == ("storage", "cpu")
        content = np.frombuffer(self.archive.read(f"model/data/{key}"), dtype)
        assert len(content) == size
        return content

    @staticmethod
    def rebuild(storage, first, shape, strides, needs_gradient, hooks):
        assert not needs_gradient and not hooks
        steps = [stride * storage.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(storage[first:], shape, steps)


def test_the_file_has_the_format_of_torch_save(tmp_path):
    """The same where PyTorch is not installed."""
    write_state_dict(path := tmp_path / "model.pt", ARRAYS)
    with zipfile.ZipFile(path) as archive:
        found = Unpickler(archive).load()
        assert archive.read("model/version") == b"3\n"
        assert archive.read("model/byteorder") == b"little"
        assert archive.testzip() is None
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)


def test_the_same_arrays_give_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        write_state_dict(tmp_path / name, ARRAYS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_type_unknown_to_torch_is_named(tmp_path):
    with pytest.raises(ValueError, match="a has the type complex64, unknown to PyTorch"):
        mr.export(tmp_path, {"a": np.zeros(1, np.complex64)}, formats=["torch"])
