"""Images decoded on request: reproducible, with corrupt ones replaced and named."""

import io
import itertools
import struct
import tomllib
import zlib
from pathlib import Path

import numpy as np
import pytest
from image_files import SMALL, decode, encode, make_image, write_folders
from worker_jobs import MadeImages, PartlyCorruptReader

from millrace.data import decoding, image_source, imagenet
from millrace.data.decoded_cache import DecodedCache
from millrace.data.image_source import TooManyCorrupt
from millrace.data.imagenet import ImageFolder
from millrace.data.stream import EvaluationBatches, Stream

ROOT = Path(__file__).parents[2]


def corrupt_file(path, number=0, keep=0.8):
    """Truncate an image, and return its name."""
    victim = sorted(path.rglob("*.JPEG"))[number]
    content = victim.read_bytes()
    victim.write_bytes(content[: int(keep * len(content))])
    return str(victim)


def test_a_stream_resumes_with_the_same_images_for_any_number_of_workers(tmp_path):
    write_folders(tmp_path)

    def batches(start, num_workers):
        source = ImageFolder(tmp_path / "train", SMALL, num_workers=num_workers)
        stream = source.stream(4, seed=5)
        stream.seek(start)
        return list(itertools.islice(stream, 7 - start))

    whole = batches(0, 0)
    for start, others in ((0, batches(0, 1)), (0, batches(0, 4)), (4, batches(4, 2))):
        for expected, batch in zip(whole[start:], others, strict=True):
            np.testing.assert_array_equal(batch["image"], expected["image"])
            np.testing.assert_array_equal(batch["label"], expected["label"])


def test_batches_of_another_size_have_the_same_images(tmp_path):
    """So that a run may continue with another number of replicas."""
    write_folders(tmp_path)
    source = ImageFolder(tmp_path / "train", SMALL)
    whole = source.stream(8, batches_per_epoch=1, seed=5)
    halves = source.stream(4, batches_per_epoch=2, seed=5)
    for position in range(3):  # in three epochs
        parts = [halves.batch(2 * position + n) for n in (0, 1)]
        for name, expected in whole.batch(position).items():
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, expected)


@pytest.mark.parametrize(
    ("batch_size", "ahead"), [(256, 4), (128, 8), (100, 11), (1024, 4)]
)
def test_every_worker_has_four_tasks_however_small_a_batch_is(batch_size, ahead):
    source = MadeImages(2000, num_workers=16)
    stream = source.stream(batch_size)
    assert stream.ahead == ahead
    # A process that reads a part of every batch needs more of them.
    assert stream.share(slice(0, batch_size // 4)).ahead == -(-1024 // (batch_size // 4))
    assert source.stream(batch_size, min_ahead=20).ahead == 20
    assert source.stream(batch_size, ahead=2).ahead == 2
    assert MadeImages(2000, num_workers=0).stream(batch_size).ahead == 4


def test_an_image_is_prepared_differently_in_every_epoch(tmp_path):
    write_folders(tmp_path, num_classes=1)
    stream = ImageFolder(tmp_path / "train", SMALL).stream(5, shuffle=False)
    first, second = stream.batch(0), stream.batch(1)
    assert (first["image"] != second["image"]).any((1, 2, 3)).all()


def test_plain_streams_and_evaluation_read_images_like_any_source(tmp_path):
    validation = ImageFolder(write_folders(tmp_path) / "val", SMALL)
    assert Stream(validation, 4).batch(0)["image"].shape == (4, 16, 16, 3)
    seen = [item["batch"]["label"] for item in EvaluationBatches(validation, 4)]
    assert np.concatenate(seen)[:15].tolist() == validation.labels.tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_decoded_images_are_decoded_once_and_stay_the_same(tmp_path, num_workers):
    folder = write_folders(tmp_path) / "val"
    corrupt_file(folder, number=1)
    plain = ImageFolder(folder, SMALL, num_workers=num_workers)
    kept = ImageFolder(folder, SMALL, num_workers=num_workers)
    assert kept.keep_decoded(1 << 20)
    for _ in range(3):
        pairs = zip(EvaluationBatches(plain, 4), EvaluationBatches(kept, 4), strict=True)
        for expected, got in pairs:
            np.testing.assert_array_equal(got["valid"], expected["valid"])
            for name in ("image", "label"):
                np.testing.assert_array_equal(got["batch"][name], expected["batch"][name])
    batches = -(-len(kept) // 4)
    assert (plain.num_decoded, kept.num_decoded) == (12 * batches, 4 * batches)
    np.testing.assert_array_equal(kept[np.arange(3)]["image"], plain[np.arange(3)]["image"])
    assert kept.corrupt == plain.corrupt


def test_a_partly_read_cache_is_completed_in_order(tmp_path):
    source = ImageFolder(write_folders(tmp_path) / "val", SMALL)
    expected = source[np.arange(8)]
    source.keep_decoded(1 << 20)
    _ = source[np.array([0, 1, 4, 5])]
    wanted = [np.array(pair) for pair in ([0, 1], [2, 3], [4, 5], [6, 7])]
    got = list(source.batches([(pair, None) for pair in wanted], 2))
    labels = np.concatenate([batch["label"] for batch in got])
    np.testing.assert_array_equal(labels, expected["label"])
    images = np.concatenate([batch["image"] for batch in got])
    np.testing.assert_array_equal(images, expected["image"])


def test_random_crops_are_never_kept_nor_images_that_do_not_fit(tmp_path):
    source = ImageFolder(write_folders(tmp_path) / "train", SMALL)
    needed = DecodedCache.num_bytes(len(source), SMALL.size)
    assert not source.keep_decoded(needed - 1)
    assert source.keep_decoded(needed)
    stream = source.stream(5, shuffle=False)
    epoch = -(-len(source) // 5)
    assert (stream.batch(0)["image"] != stream.batch(epoch)["image"]).any()
    assert source.num_decoded == 10


def test_a_corrupt_image_is_named_and_replaced_by_the_next_one(tmp_path):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL)
    expected = training[np.array([4, 1, 7, 2])]
    names = {  # samples 0 and 3: one ends in its pixels, one in its header
        corrupt_file(tmp_path / "train", number=number, keep=keep)
        for number, keep in ((0, 0.8), (2, 0.1))
    }
    for _ in range(2):
        batch = training[np.array([3, 0, 7, 2])]
        np.testing.assert_array_equal(batch["label"], expected["label"])
        np.testing.assert_array_equal(batch["image"], expected["image"])
    assert set(training.corrupt) == names  # each counted once
    assert all("runcated" in reason for reason in training.corrupt.values())


def test_the_last_image_is_replaced_by_the_first_that_is_not_corrupt(
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
def test_parts_of_a_batch_replace_corrupt_images_like_the_whole_batch(tmp_path, edges):
    write_folders(tmp_path)
    for number in (0, 1, 4):
        corrupt_file(tmp_path / "train", number=number, keep=0.8)

    def stream():  # of another process, which has not seen any of them yet
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
    """Return the start of a PNG, which gives its size, and nothing more."""
    body = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    start = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + start + struct.pack(">I", 0) + b"IDAT"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_with_too_many_pixels_is_rejected_before_decoding(tmp_path):
    write_folders(tmp_path)
    victim = tmp_path / "train" / "class_0" / "1.png"
    victim.write_bytes(png_header(13_000))
    training = ImageFolder(tmp_path / "train", SMALL)
    training[np.arange(3)]
    (reason,) = training.corrupt.values()
    assert reason == "it has 13000 x 13000 pixels, more than 64 million"


def test_a_jpeg_may_be_larger_if_it_can_be_decoded_at_reduced_size(monkeypatch):
    monkeypatch.setattr(decoding, "_MAX_PIXELS", 48 * 40 - 1)
    monkeypatch.setattr(decoding, "_MAX_JPEG_PIXELS", 48 * 40)
    content = encode(make_image(0))
    assert decode(content).shape == (16, 16, 3)
    progressive = io.BytesIO()
    make_image(0).save(progressive, "JPEG", progressive=True)
    for other in (progressive, io.BytesIO(encode(make_image(0), "PNG"))):
        with pytest.raises(ValueError, match="48 x 40 pixels"):
            decoding.open_image(other)
    monkeypatch.setattr(decoding, "_MAX_JPEG_PIXELS", 48 * 40 - 1)
    with pytest.raises(ValueError, match="48 x 40 pixels"):
        decoding.open_image(io.BytesIO(content))


def test_more_corrupt_images_than_allowed_are_an_error_that_names_them(tmp_path):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL, max_corrupt=1)
    names = [corrupt_file(tmp_path / "train", 0)]
    assert len(training[np.arange(4)]["label"]) == 4
    names.append(corrupt_file(tmp_path / "train", 3))
    with pytest.raises(TooManyCorrupt, match=r"2 of 15 samples .* at most 1") as caught:
        training[np.arange(5)]
    assert set(caught.value.names) == set(names)
    assert all(name in str(caught.value) for name in names)


def test_the_default_limit_is_a_thousandth_and_at_least_ten(tmp_path, monkeypatch):
    source = ImageFolder(write_folders(tmp_path) / "train", SMALL)
    assert source.max_corrupt == 10
    monkeypatch.setattr(imagenet, "_read_file", lambda location: (b"bad", 0))
    with pytest.raises(TooManyCorrupt, match="11 of 15 samples"):
        source[np.arange(15)]
    numbers = tmp_path / "many" / "class"
    numbers.mkdir(parents=True)
    for number in range(12_000):
        (numbers / f"{number}.png").touch()
    assert ImageFolder(tmp_path / "many", SMALL).max_corrupt == 12


def test_a_dataset_of_only_corrupt_images_is_an_error(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(TooManyCorrupt, match="1 of 1 samples"):
        ImageFolder(tmp_path, SMALL)[np.array([0])]


def test_of_many_corrupt_images_three_are_named_and_the_rest_counted(tmp_path):
    write_folders(tmp_path)
    training = ImageFolder(tmp_path / "train", SMALL, max_corrupt=5)
    names = [corrupt_file(tmp_path / "train", number) for number in range(10)]
    with pytest.raises(TooManyCorrupt, match="6 of 15 samples") as caught:
        training[np.arange(15)]
    assert str(caught.value).endswith("and 3 more")
    assert sum(name in str(caught.value) for name in names) == 3


@pytest.mark.parametrize("keep", [0.05, 0.8])
def test_webp_is_read_and_its_damage_detected(tmp_path, keep):
    write_folders(tmp_path)
    folder = tmp_path / "train" / "class_0"
    for number in (0, 1):
        content = encode(make_image(0), "WEBP")
        content = content[: int(keep * len(content))] if number else content
        (folder / f"a{number}.webp").write_bytes(content)
    training = ImageFolder(tmp_path / "train", SMALL)
    places = [n for n in range(len(training)) if training.name(n).endswith(".webp")]
    read = training[np.array(places)]["image"][0].astype(int)
    assert np.abs(read - decode(make_image(0)).astype(int)).mean() < 8
    assert list(training.corrupt) == [str(folder / "a1.webp")]


def test_formats_other_than_jpeg_png_and_webp_are_not_opened(tmp_path):
    write_folders(tmp_path)
    victim = tmp_path / "train" / "class_0" / "0.JPEG"
    victim.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    training = ImageFolder(tmp_path / "train", SMALL)
    training[np.arange(3)]
    assert training.corrupt == {str(victim): "not a JPEG, PNG or WebP image"}


def test_a_deleted_file_is_an_error_and_not_corruption(tmp_path):
    training = ImageFolder(write_folders(tmp_path) / "train", SMALL)
    (tmp_path / "train" / "class_0" / "0.JPEG").unlink()
    with pytest.raises(FileNotFoundError, match=r"0\.JPEG"):
        training[np.arange(3)]


@pytest.mark.parametrize("option", [{"num_workers": -1}, {"max_corrupt": -1}])
def test_impossible_options_are_rejected(tmp_path, option):
    write_folders(tmp_path)
    with pytest.raises(ValueError, match=next(iter(option))):
        ImageFolder(tmp_path / "train", SMALL, **option)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_replacements_of_corrupt_samples_are_not_evaluated(num_workers):
    read = PartlyCorruptReader({3, 7})
    batches = EvaluationBatches(MadeImages(10, read=read, num_workers=num_workers), 4)
    seen = [
        label
        for element in batches
        for label, valid in zip(element["batch"]["label"], element["valid"], strict=True)
        if valid
    ]
    assert seen == [0, 1, 2, 4, 5, 6, 8, 9]
    assert batches.num_valid == 8
    list(batches)
    assert batches.num_valid == 8  # of the last pass only


def test_the_advice_for_a_slow_stream_names_what_is_not_done_yet(monkeypatch):
    source = MadeImages(num_workers=0)
    monkeypatch.setattr(image_source, "num_cores", lambda: 2)
    monkeypatch.setattr(image_source, "decoder_name", lambda: "Pillow")
    advice = source.stream(4).advice
    assert advice == (
        "Use more workers (--num-workers 2); or install faster decoders: millrace[images], "
        "with pip install '.[images]'; or resize the images once (millrace data pack "
        "--short-side 256)."
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "simplejpeg" in " ".join(project["optional-dependencies"]["images"])
    source.num_workers, source.is_packed = 2, True
    monkeypatch.setattr(image_source, "decoder_name", lambda: "OpenCV")
    advice = source.stream(4).share(slice(0, 2)).advice
    assert advice.startswith("Use a machine with more cores, or store pixels (data pack")


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (4, 3), (16, 15)])
def test_a_core_is_left_to_the_process_that_feeds_the_devices(monkeypatch, cores, workers):
    monkeypatch.setattr(image_source, "num_cores", lambda: cores)
    assert image_source.usual_num_workers() == workers
