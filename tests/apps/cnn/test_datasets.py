"""``cnn verify-dataset`` and ``cnn benchmark-dataset`` from the command line."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from image_files import encode, example, make_image, write_folders, write_records
from worker_jobs import MadeImages, read_slowly

from millrace.apps.cnn import datasets
from millrace.cli import main
from millrace.data import cifar as cifar_files
from millrace.data.decoding import decoder_name
from millrace.data.image_source import num_cores


@pytest.fixture(autouse=True)
def small_cifar(monkeypatch):
    """Accept files of 20 images as complete."""
    monkeypatch.setattr(cifar_files, "_num_images", lambda name, layout, file: 20)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command in this process; return its status and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "cache"))

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main(words)
        output = capsys.readouterr()
        return left.value.code, output.out, output.err

    return call


def write_cifar(folder, per_file=20):
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (per_file, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
    return folder


# verify-dataset


def test_a_correct_dataset_gives_status_0(command):
    status, out, _ = command("cnn", "verify-dataset", "--dataset", "digits")
    assert status == 0
    assert out.splitlines() == [
        "digits, 1,437 training and 360 validation samples, 10 classes",
        "No mismatches found.",
    ]


def test_each_mismatch_is_a_line_and_gives_status_1(command, tmp_path):
    write_cifar(tmp_path)
    status, out, errors = command("cnn", "verify-dataset", "--dataset-path", str(tmp_path))
    assert (status, errors) == (1, "")
    assert out.splitlines() == [
        f"cifar10 from {tmp_path}, 100 training and 20 validation samples, 10 classes",
        "mismatch: cifar10 has 100 training samples; expected 50,000.",
        "mismatch: cifar10 has 20 validation samples; expected 10,000.",
    ]


def test_own_images_are_only_checked_for_readability(command, tmp_path):
    write_folders(tmp_path)
    words = ("cnn", "verify-dataset", "--dataset", "imagefolder", "--num-samples", "0")
    assert command(*words)[0] == 0
    victims = [tmp_path / "train" / f"class_{label}" / "0.JPEG" for label in range(3)]
    for victim in victims:
        victim.write_bytes(b"")
    status, out, _ = command(*words)
    assert status == 1
    assert [f"{victim.relative_to(tmp_path)} cannot be read" in out for victim in victims]
    assert out.count("mismatch: ") == 3


def test_a_part_of_imagenet_is_a_mismatch(command, tmp_path):
    for name, label in (("train-0", 1), ("validation-0", 1001)):
        write_records(tmp_path / name, [example(encode(make_image(0)), label)])
    status, out, _ = command("cnn", "verify-dataset", "--dataset", "imagenet")
    assert status == 1
    assert "mismatch: validation-0, byte 12 has the label 1001;" in out
    write_folders(tmp_path)
    status, out, _ = command("cnn", "verify-dataset", "--dataset", "imagenet")
    assert status == 1
    assert "mismatch: imagenet has 3 classes; expected 1000." in out
    assert "mismatch: imagenet has 15 training samples; expected 1,281,167." in out


def test_a_damaged_file_is_a_mismatch_and_a_missing_one_an_error(command, tmp_path):
    status, out, errors = command("cnn", "verify-dataset", "--dataset", "cifar10")
    assert (status, out) == (2, "")
    assert "`millrace data fetch cifar10`" in errors
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"123")
    status, out, _ = command("cnn", "verify-dataset", "--dataset", "cifar10")
    assert status == 1
    assert out.startswith("mismatch: data_batch_3.bin is not a file of cifar10: 3 bytes")


# benchmark-dataset


def test_the_benchmark_prints_one_line_and_saves_the_measurements(command, tmp_path):
    write_cifar(tmp_path)
    status, out, errors = command(
        *("cnn", "benchmark-dataset", "--micro-batch-size", "10", "--num-epochs", "4"),
        *("--accelerator-side-preprocess", "--eight-bit-transfer", "--run-dir", "run"),
    )
    assert status == 0, errors
    assert out.startswith("Throughput = ") and out.endswith(" examples/sec\n")
    report = json.loads((tmp_path / "run" / "dataset_benchmark.json").read_text())
    assert len(report["epochs"]) == 4
    for epoch in report["epochs"]:
        assert epoch["elements_processed"] == 10
        assert epoch["total_bytes_processed"] == 100 * (3072 + 4)
        speed = epoch["elements_processed"] / epoch["time_elapsed"]
        assert epoch["elements_per_second"] == pytest.approx(speed)
        size = epoch["total_bytes_processed"] / 1e9 / epoch["time_elapsed"]
        assert epoch["bandwidth"] == pytest.approx(size)
    mean = np.mean([epoch["elements_per_second"] for epoch in report["epochs"][2:]])
    assert float(out.split()[2]) == pytest.approx(mean * 10, abs=0.01)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["samples_per_second"] == pytest.approx(mean * 10)
    recorded = yaml.safe_load((tmp_path / "run" / "config.yml").read_text())
    assert recorded["command"] == "cnn-benchmark-dataset"


@pytest.mark.parametrize(("epochs", "counted"), [(1, 1), (2, 1), (3, 1), (5, 3)])
def test_warmup_epochs_are_excluded(epochs, counted):
    figures = [{"elements_per_second": float(number)} for number in range(epochs)]
    expected = np.mean(np.arange(epochs)[-counted:])
    assert datasets._throughput(figures) == expected


@pytest.mark.parametrize(
    ("words", "elements", "size"),
    [
        (["--split", "validation"], 2, 20 * (4 * 3072 + 4)),
        (["--elements-per-epoch", "3"], 3, 30 * (4 * 3072 + 4)),
        (["--synthetic-data", "host", "--elements-per-epoch", "4"], 4, 40 * 12_292),
    ],
)
def test_json_goes_to_standard_output_only(command, tmp_path, words, elements, size):
    write_cifar(tmp_path)
    before = sorted(tmp_path.iterdir())
    status, out, errors = command(
        *("cnn", "benchmark-dataset", "--micro-batch-size", "10", "--json"),
        *("--precision", "16.16", *words),
    )
    assert status == 0, errors
    (epoch,) = json.loads(out)["epochs"]
    assert (epoch["elements_processed"], epoch["total_bytes_processed"]) == (elements, size)
    assert "Throughput = " in errors
    assert "--precision has no effect: " in errors
    assert sorted(tmp_path.iterdir()) == before


def test_the_benchmark_decodes_image_files(command, tmp_path):
    write_folders(tmp_path)
    status, out, errors = command(
        *("cnn", "benchmark-dataset", "--dataset", "imagefolder", "--image-size", "16"),
        *("--micro-batch-size", "5", "--json", "--quiet", "--num-epochs", "2"),
    )
    assert status == 0, errors
    report = json.loads(out)
    assert [e["elements_processed"] for e in report["epochs"]] == [3, 3]


def test_the_benchmark_of_image_files_says_where_the_time_goes(command, tmp_path):
    write_folders(tmp_path)
    status, out, errors = command(
        *("cnn", "benchmark-dataset", "--dataset", "imagefolder", "--image-size", "16"),
        *("--micro-batch-size", "5", "--json", "--num-epochs", "2", "--num-workers", "1"),
    )
    assert status == 0, errors
    report = json.loads(out)
    assert (report["num_workers"], report["decoder"]) == (1, decoder_name())
    throughput = report["epochs"][1]["elements_per_second"] * 5
    assert report["images_per_core_second"] == pytest.approx(throughput)  # of one worker
    steps = report["microseconds_per_image"]
    assert list(steps) == ["reading", "decoding", "resizing", "staging", "copying"]
    assert all(0 < microseconds < 1e6 for microseconds in steps.values())
    per_core, total = (line for line in errors.splitlines() if "image" in line)
    expected = f"{throughput:,.0f} images/s per core, 1 worker process, decoded by "
    assert per_core == expected + decoder_name()
    shares = {n: f"{value / sum(steps.values()):.0%}" for n, value in steps.items()}
    listed = ", ".join(f"{name} {share}" for name, share in shares.items())
    assert total == f"{sum(steps.values()) / 1000:.2f} ms per image: {listed}"


def test_the_time_of_each_step_is_that_of_one_image():
    source = MadeImages(40, read=read_slowly, num_workers=0)  # 10 ms per image
    batch = next(iter(source.stream(8)))
    report = datasets._profile(source, 50.0, batch)
    assert 10_000 < report["microseconds_per_image"]["reading"] < 60_000
    assert report["images_per_core_second"] == 50 / num_cores()
    lines = list(datasets._profile_lines(report))
    assert lines[0].endswith(f" images/s per core, threads, decoded by {decoder_name()}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--synthetic-data", "device"], "nothing to measure. Use host."),
        (["--num-epochs", "0"], "--num-epochs must be at least 1"),
        (["--elements-per-epoch", "0"], "--elements-per-epoch must be at least 1"),
        (["--eight-bit-transfer"], "accelerator_side_preprocess must be on"),
        (["--micro-batch-size", "0"], "--micro-batch-size must be at least 1"),
        (
            ["--dataset", "digits", "--micro-batch-size", "2000"],
            "smaller --micro-batch-size",
        ),
        (["--image-size", "64"], "images of cifar10 keep their size"),
        (["--dataset", "mnist"], "`millrace data fetch mnist`"),
    ],
)
def test_invalid_options_give_status_2(command, tmp_path, words, message):
    status, out, errors = command("cnn", "benchmark-dataset", *words)
    assert (status, out) == (2, "")
    assert message in errors
    assert not (tmp_path / "runs").exists()


# All commands


@pytest.mark.parametrize(
    "words",
    [
        ["cnn", "verify-dataset"],
        ["cnn", "benchmark-dataset"],
        ["cnn", "train"],
        ["data", "fetch"],
    ],
)
def test_help_imports_no_heavy_libraries(words):
    code = (
        "import sys\n"
        "from millrace.cli import main\n"
        "try:\n"
        f"    main({[*words, '--help']!r})\n"
        "except SystemExit as left:\n"
        "    heavy = {'jax', 'numpy', 'PIL', 'rich'} & set(sys.modules)\n"
        "    sys.exit(left.code or ', '.join(heavy) or 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: millrace {' '.join(words)}")
