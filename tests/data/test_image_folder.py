import functools
import io
import itertools
import struct
import tarfile
import zlib

import numpy as np
import pytest
from image_files import encode, picture, real_data, write_folders

from millrace.config import ConfigurationError
from millrace.data import image_source
from millrace.data.augment import imagenet_image
from millrace.data.image_folder import ImageFolder, load_image_folder
from millrace.data.image_source import TooManyCorrupt
from millrace.data.parallel import ParallelStream
from millrace.data.stream import EvaluationBatches, Stream

SMALL = functools.partial(imagenet_image, size=16)


def spoil(path, number=0, keep=0.8):
    """Cut a picture short, and return its name."""
    victim = sorted(path.rglob("*.JPEG"))[number]
    content = victim.read_bytes()
    victim.write_bytes(content[: int(keep * len(content))])
    return str(victim)


def test_the_folder_is_the_label_and_validation_is_prepared_without_chance(tmp_path):
    write_folders(tmp_path)
    training, validation = load_image_folder(tmp_path, SMALL)
    assert (len(training), len(validation)) == (15, 15)
    assert training.classes == validation.classes == ("class_0", "class_1", "class_2")
    batch = validation[np.array([14, 0, 6])]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    assert batch["label"].tolist() == [2, 0, 1]
    expected = SMALL(picture(0), None).astype(int)
    assert np.abs(batch["image"][1] - expected).mean() < 8  # but for JPEG's loss
    np.testing.assert_array_equal(batch["image"], validation[np.array([14, 0, 6])]["image"])


@pytest.mark.parametrize("held_out", ["val", "validation", "test"])
def test_the_held_out_folder_may_have_any_of_three_names(tmp_path, held_out):
    (write_folders(tmp_path) / "val").rename(tmp_path / held_out)
    assert len(load_image_folder(tmp_path, SMALL)[1]) == 15


def test_only_pictures_are_taken_and_deeper_ones_too(tmp_path):
    folder = write_folders(tmp_path) / "train" / "class_1"
    (folder / "notes.txt").write_text("no picture")
    (folder / "._0.JPEG").write_bytes(b"left by a Mac")
    (folder / "images").mkdir()
    (folder / "images" / "9.JPG").write_bytes(encode(picture(9)))
    training = ImageFolder(tmp_path / "train", SMALL)
    assert len(training) == 16
    assert training.name(10).endswith("class_1/images/9.JPG")
    assert training.labels.tolist() == [0] * 5 + [1] * 6 + [2] * 5


def test_a_stream_resumes_with_the_same_pictures_for_any_number_of_threads(tmp_path):
    write_folders(tmp_path)

    def batches(start, num_threads, wrap=lambda stream: stream):
        source = ImageFolder(tmp_path / "train", SMALL, num_threads=num_threads)
        stream = wrap(source.stream(4, seed=5))
        stream.seek(start)
        return list(itertools.islice(stream, 7 - start))

    whole = batches(0, 1)
    for start, others in (
        (0, batches(0, 3)),
        (4, batches(4, 2)),
        (4, batches(4, 1, lambda stream: ParallelStream(stream, 2))),
    ):
        for expected, batch in zip(whole[start:], others, strict=True):
            np.testing.assert_array_equal(batch["image"], expected["image"])
            np.testing.assert_array_equal(batch["label"], expected["label"])


def test_a_picture_is_prepared_differently_in_every_epoch(tmp_path):
    write_folders(tmp_path, num_classes=1)
    stream = ImageFolder(tmp_path / "train", SMALL).stream(5, shuffle=False)
    first, second = stream.batch(0), stream.batch(1)
    assert (first["image"] != second["image"]).any((1, 2, 3)).all()


def test_a_further_transform_follows_decoding(tmp_path):
    write_folders(tmp_path)

    def darken(batch, generator):
        return batch | {"image": batch["image"] // 2, "draw": generator.random()}

    source = ImageFolder(tmp_path / "train", SMALL)
    plain = source.stream(4, seed=1).batch(2)
    dark = source.stream(4, seed=1, transform=darken).batch(2)
    np.testing.assert_array_equal(dark["image"], plain["image"] // 2)
    assert 0 <= dark["draw"] < 1


def test_the_plain_stream_and_evaluation_read_it_like_any_source(tmp_path):
    validation = ImageFolder(write_folders(tmp_path) / "val", SMALL)
    assert Stream(validation, 4).batch(0)["image"].shape == (4, 16, 16, 3)
    seen = [item["batch"]["label"] for item in EvaluationBatches(validation, 4)]
    assert np.concatenate(seen)[:15].tolist() == validation.labels.tolist()


def test_a_corrupt_picture_is_named_and_replaced_by_the_next_of_the_data_set(tmp_path):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL)
    expected = training[np.array([4, 1, 7, 2])]
    names = {  # samples 0 and 3: one file ends in its pixels, one in its header
        spoil(tmp_path / "train", number=number, keep=keep)
        for number, keep in ((0, 0.8), (2, 0.1))
    }
    for _ in range(2):
        batch = training[np.array([3, 0, 7, 2])]
        np.testing.assert_array_equal(batch["label"], expected["label"])
        np.testing.assert_array_equal(batch["image"], expected["image"])
    assert set(training.corrupt) == names  # each counted once
    assert all("runcated" in reason for reason in training.corrupt.values())


def test_the_last_picture_is_replaced_by_the_first_and_corrupt_ones_are_passed_over(
    tmp_path,
):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL)
    expected = training[np.array([1])]["image"]
    for path in sorted((tmp_path / "train").rglob("0.JPEG"))[:1]:
        path.write_bytes(b"")
    for path in sorted((tmp_path / "train").rglob("4.JPEG"))[-1:]:
        path.write_bytes(b"")
    np.testing.assert_array_equal(training[np.array([14])]["image"], expected)
    assert len(training.corrupt) == 2


@pytest.mark.parametrize("edges", [(0, 3, 6), (0, 1, 2, 6), (0, 5, 6)])
def test_parts_of_a_batch_replace_corrupt_pictures_as_the_whole_does(tmp_path, edges):
    write_folders(tmp_path)
    for number in (0, 1, 4):
        spoil(tmp_path / "train", number=number, keep=0.8)

    def stream():  # of another process, which has seen none of them yet
        return ImageFolder(tmp_path / "train", SMALL).stream(6, seed=1)

    whole, parts = (
        stream(),
        [stream().share(slice(*rows)) for rows in itertools.pairwise(edges)],
    )
    for position in (0, 1, 2, 0):
        expected = whole.batch(position)
        found = [part.batch(position) for part in parts]
        for name, array in expected.items():
            joined = np.concatenate([batch[name] for batch in found])
            np.testing.assert_array_equal(joined, array)
    assert len(whole.source) == 15


def png_header(side: int) -> bytes:
    """The beginning of a PNG, which says its size, and nothing more."""
    body = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    start = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + start + struct.pack(">I", 0) + b"IDAT"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_too_many_pixels_is_corrupt_before_it_is_decoded(tmp_path):
    write_folders(tmp_path)
    victim = tmp_path / "train" / "class_0" / "1.png"
    victim.write_bytes(png_header(13_000))
    training = ImageFolder(tmp_path / "train", SMALL)
    training[np.arange(3)]
    (reason,) = training.corrupt.values()
    assert reason == "it has 13000 x 13000 pixels, more than 64 million"


def test_a_large_jpeg_is_read_where_it_can_be_decoded_smaller(monkeypatch):
    monkeypatch.setattr(image_source, "_MOST_PIXELS", 48 * 40 - 1)
    monkeypatch.setattr(image_source, "_MOST_JPEG_PIXELS", 48 * 40)
    content = encode(picture(0))
    assert SMALL(image_source.open_image(io.BytesIO(content)), None).shape == (16, 16, 3)
    progressive = io.BytesIO()
    picture(0).save(progressive, "JPEG", progressive=True)
    for other in (progressive, io.BytesIO(encode(picture(0), "PNG"))):
        with pytest.raises(ValueError, match="48 x 40 pixels"):
            image_source.open_image(other)
    monkeypatch.setattr(image_source, "_MOST_JPEG_PIXELS", 48 * 40 - 1)
    with pytest.raises(ValueError, match="48 x 40 pixels"):
        image_source.open_image(io.BytesIO(content))


def test_more_corrupt_pictures_than_the_limit_are_an_error_with_their_names(tmp_path):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL, max_corrupt=1)
    names = [spoil(tmp_path / "train", 0)]
    assert len(training[np.arange(4)]["label"]) == 4
    names.append(spoil(tmp_path / "train", 3))
    with pytest.raises(TooManyCorrupt, match=r"2 of 15 samples .* at most 1") as caught:
        training[np.arange(5)]
    assert set(caught.value.names) == set(names)
    assert all(name in str(caught.value) for name in names)


def test_the_limit_is_a_thousandth_and_at_least_ten(tmp_path, monkeypatch):
    source = ImageFolder(write_folders(tmp_path) / "train", SMALL)
    assert source.max_corrupt == 10
    monkeypatch.setattr(ImageFolder, "encoded", lambda self, index: (b"bad", 0))
    with pytest.raises(TooManyCorrupt, match="15 of 15 samples"):
        source[np.arange(15)]
    numbers = tmp_path / "many" / "class"
    numbers.mkdir(parents=True)
    for number in range(12_000):
        (numbers / f"{number}.png").touch()
    assert ImageFolder(tmp_path / "many", SMALL).max_corrupt == 12


def test_a_small_set_that_is_corrupt_throughout_is_an_error(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(TooManyCorrupt, match="1 of 1 samples"):
        ImageFolder(tmp_path, SMALL)[np.array([0])]


def test_of_many_corrupt_pictures_a_few_are_named_and_the_rest_counted(tmp_path):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL, max_corrupt=5)
    names = [spoil(tmp_path / "train", number) for number in range(10)]
    with pytest.raises(TooManyCorrupt, match="10 of 15 samples") as caught:
        training[np.arange(15)]
    assert str(caught.value).endswith("and 7 more")
    assert sum(name in str(caught.value) for name in names) == 3


@pytest.mark.parametrize("keep", [0.05, 0.8])
def test_webp_is_read_and_its_damage_noticed(tmp_path, keep):
    write_folders(tmp_path)
    folder = tmp_path / "train" / "class_0"
    for number in (0, 1):
        content = encode(picture(0), "WEBP")
        content = content[: int(keep * len(content))] if number else content
        (folder / f"a{number}.webp").write_bytes(content)
    training = ImageFolder(tmp_path / "train", SMALL)
    places = [n for n in range(len(training)) if training.name(n).endswith(".webp")]
    read = training[np.array(places)]["image"][0].astype(int)
    assert np.abs(read - SMALL(picture(0), None).astype(int)).mean() < 8
    assert list(training.corrupt) == [str(folder / "a1.webp")]


def test_what_is_missing_is_val_where_there_is_train(tmp_path):
    (write_folders(tmp_path) / "val").rename(tmp_path / "unused")
    with pytest.raises(ConfigurationError, match=r"has train/, but not val/"):
        load_image_folder(tmp_path, SMALL)
    training, validation = load_image_folder(tmp_path, SMALL, needs_validation=False)
    assert (len(training), validation) == (15, None)


def test_formats_other_than_jpeg_png_and_webp_are_not_opened(tmp_path):
    write_folders(tmp_path)
    victim = tmp_path / "train" / "class_0" / "0.JPEG"
    victim.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    training = ImageFolder(tmp_path / "train", SMALL)
    training[np.arange(3)]
    assert training.corrupt == {str(victim): "neither JPEG, PNG nor WebP"}


def test_a_file_that_vanished_is_an_error_and_no_corruption(tmp_path):
    training = ImageFolder(write_folders(tmp_path) / "train", SMALL)
    (tmp_path / "train" / "class_0" / "0.JPEG").unlink()
    with pytest.raises(FileNotFoundError, match=r"0\.JPEG"):
        training[np.arange(3)]


def test_pictures_of_different_shapes_are_refused_plainly(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "train" / "class_0" / "0.JPEG").write_bytes(encode(picture(0, size=(9, 9))))
    training = ImageFolder(tmp_path / "train", lambda image, generator: np.asarray(image))
    with pytest.raises(
        ValueError, match=r"different shapes: \[\(9, 9, 3\), \(40, 48, 3\)\]"
    ):
        training[np.arange(3)]


def test_a_missing_or_misshapen_data_set_is_said_so(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigurationError) as caught:
            load_image_folder(path, SMALL)
        for part in (str(path), "train/<class>/*.jpg", "--dataset-path"):
            assert part in str(caught.value)
    write_folders(tmp_path)
    (tmp_path / "val" / "class_7").mkdir()
    with pytest.raises(ValueError, match="has the class class_7, which training has not"):
        load_image_folder(tmp_path, SMALL)
    (tmp_path / "train" / "class_7").mkdir()
    with pytest.raises(ValueError, match=r"class_7 has no pictures.*\.png or \.webp"):
        load_image_folder(tmp_path, SMALL)


def test_validation_pictures_that_are_not_in_class_folders_are_said_so(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "test").mkdir()
    (tmp_path / "val").rename(tmp_path / "unused")
    (tmp_path / "test" / "ILSVRC2012_val_00000001.JPEG").write_bytes(encode(picture(0)))
    with pytest.raises(ValueError, match="has no class folders"):
        load_image_folder(tmp_path, SMALL)


@pytest.mark.parametrize("option", [{"num_threads": 0}, {"max_corrupt": -1}])
def test_impossible_options_are_refused(tmp_path, option):
    write_folders(tmp_path)
    with pytest.raises(ValueError, match=next(iter(option))):
        ImageFolder(tmp_path / "train", SMALL, **option)


def test_real_pictures_in_class_folders_are_read(tmp_path):
    path = real_data("imagenet_small/imagenette160.tar")
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path, filter="data")
    training, validation = load_image_folder(tmp_path / "imagenette160", imagenet_image)
    assert (len(training), len(validation)) == (1000, 500)
    assert np.bincount(training.labels).tolist() == [100] * 10
    batch = training.stream(64, seed=0).batch(3)
    assert batch["image"].shape == (64, 224, 224, 3)
    colors = validation[np.arange(0, 500, 10)]["image"].mean((0, 1, 2)) / 255
    np.testing.assert_allclose(colors, [0.464, 0.458, 0.430], atol=0.05)
    assert training.corrupt == validation.corrupt == {}
