"""Small image datasets for tests, and the location of the real ones, where present."""

import functools
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from millrace.data.decoding import Crop, decode_into

SMALL = Crop(size=16)
REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def real_data(name: str) -> Path:
    """Return the path of a real dataset, or skip the test."""
    path = REAL_DATA / name
    if not path.exists():
        pytest.skip(f"the real dataset {path} is not on this machine")
    return path


def make_image(
    seed: int, mode: str = "RGB", size: tuple[int, int] = (48, 40)
) -> Image.Image:
    """Return a smooth image that depends on the seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decode(image, crop: Crop = SMALL, draws: list[float] | None = None) -> np.ndarray:
    """Decode an encoded image, or crop a decoded one; the center without `draws`."""
    out = np.empty((crop.size, crop.size, 3), np.uint8)
    content = np.asarray(image) if isinstance(image, Image.Image) else image
    decode_into(out, content, crop, draws)
    return out


def write_folders(root: Path, num_classes: int = 3, per_class: int = 5) -> Path:
    """Write ``train`` and ``val`` folders of JPEG and PNG files."""
    for split in ("train", "val"):
        for label in range(num_classes):
            folder = root / split / f"class_{label}"
            folder.mkdir(parents=True)
            for number in range(per_class):
                kind, ending = ("PNG", "png") if number == 1 else ("JPEG", "JPEG")
                content = encode(make_image(100 * label + number), kind)
                (folder / f"{number}.{ending}").write_bytes(content)
    return root


def read_folders(root: Path) -> dict[str, list[tuple[bytes, int]]]:
    """Return the encoded images and labels of `write_folders`, in the order of files."""
    return {
        split: [
            (path.read_bytes(), int(path.parent.name.removeprefix("class_")))
            for path in sorted((root / split).rglob("*.*"))
        ]
        for split in ("train", "val")
    }


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    """Write a tar file."""
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def sample_members(name: str, content: bytes, label: int) -> list[tuple[str, bytes]]:
    """Return the members of a sample in a WebDataset tar file."""
    ending = "png" if content.startswith(b"\x89PNG") else "jpg"
    return [(f"{name}.cls", str(label).encode()), (f"{name}.{ending}", content)]


@functools.cache
def example_type():
    """Return tf.Example, built with the protobuf library as an independent oracle."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def add_message(type_name, *fields, to=file.message_type):
        message = to.add(name=type_name)
        for number, (label, kind, name) in enumerate(fields, 1):
            is_scalar = isinstance(kind, int)
            message.field.add(
                name=name,
                number=number,
                label=label,
                type=kind if is_scalar else field.TYPE_MESSAGE,
                type_name=None if is_scalar else f".t.{kind}",
            )
        return message

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    add_message("BytesList", (many, field.TYPE_BYTES, "value"))
    add_message("FloatList", (many, field.TYPE_FLOAT, "value"))
    add_message("Int64List", (many, field.TYPE_INT64, "value"))
    add_message(
        "Feature",
        (one, "BytesList", "bytes_list"),
        (one, "FloatList", "float_list"),
        (one, "Int64List", "int64_list"),
    )
    features = add_message("Features", (many, "Features.Entry", "feature"))
    entry = add_message(
        "Entry",
        (one, field.TYPE_STRING, "key"),
        (one, "Feature", "value"),
        to=features.nested_type,
    )
    entry.options.map_entry = True
    add_message("Example", (one, "Features", "features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def example(content: bytes, label: int) -> bytes:
    """Return a serialized tf.Example like those of ImageNet, bounding box included."""
    message = example_type()()
    feature = message.features.feature
    feature["image/object/bbox/xmin"].float_list.value.extend([0.25, 0.5])
    feature["image/class/text"].bytes_list.value.append(b"a thing")
    feature["image/class/label"].int64_list.value.append(label)
    feature["image/encoded"].bytes_list.value.append(content)
    return message.SerializeToString()


def write_records(path: Path, records: list[bytes]) -> Path:
    """Write a TFRecord file with the writer of TensorBoard."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        writer.flush()
    return path
