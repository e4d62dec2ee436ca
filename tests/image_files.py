"""Small image data sets for tests, and where the real ones lie if they do."""

import functools
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REAL_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def real_data(name: str) -> Path:
    """Return a real data set's path, or skip the test."""
    path = REAL_DATA / name
    if not path.exists():
        pytest.skip(f"the real data set {path} is not on this machine")
    return path


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (48, 40)) -> Image.Image:
    """Return a smooth picture that differs with the seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)


def encode(image: Image.Image, kind: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def write_folders(root: Path, num_classes: int = 3, per_class: int = 5) -> Path:
    """Write ``train`` and ``val`` folders of JPEG and PNG files."""
    for split in ("train", "val"):
        for label in range(num_classes):
            folder = root / split / f"class_{label}"
            folder.mkdir(parents=True)
            for number in range(per_class):
                kind, ending = ("PNG", "png") if number == 1 else ("JPEG", "JPEG")
                content = encode(picture(100 * label + number), kind)
                (folder / f"{number}.{ending}").write_bytes(content)
    return root


@functools.cache
def example_type():
    """Make tf.Example with the protobuf library: an oracle that is not ours."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def message(name, *fields, of=file.message_type):
        made = of.add(name=name)
        for number, (label, kind, called) in enumerate(fields, 1):
            scalar = isinstance(kind, int)
            made.field.add(
                name=called,
                number=number,
                label=label,
                type=kind if scalar else field.TYPE_MESSAGE,
                type_name=None if scalar else f".t.{kind}",
            )
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("BytesList", (many, field.TYPE_BYTES, "value"))
    message("FloatList", (many, field.TYPE_FLOAT, "value"))
    message("Int64List", (many, field.TYPE_INT64, "value"))
    message(
        "Feature",
        (one, "BytesList", "bytes_list"),
        (one, "FloatList", "float_list"),
        (one, "Int64List", "int64_list"),
    )
    features = message("Features", (many, "Features.Entry", "feature"))
    entry = message(
        "Entry",
        (one, field.TYPE_STRING, "key"),
        (one, "Feature", "value"),
        of=features.nested_type,
    )
    entry.options.map_entry = True
    message("Example", (one, "Features", "features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def example(content: bytes, label: int) -> bytes:
    """Return a serialized tf.Example as ImageNet's have them, bounding box included."""
    made = example_type()()
    feature = made.features.feature
    feature["image/object/bbox/xmin"].float_list.value.extend([0.25, 0.5])
    feature["image/class/text"].bytes_list.value.append(b"a thing")
    feature["image/class/label"].int64_list.value.append(label)
    feature["image/encoded"].bytes_list.value.append(content)
    return made.SerializeToString()


def write_records(path: Path, records: list[bytes]) -> Path:
    """Write a TFRecord file with TensorBoard's writer."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        writer.flush()
    return path
