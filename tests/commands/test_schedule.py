"""``millrace schedule`` from a user's point of view."""

import subprocess
import sys

import pytest

from millrace.cli import main
from millrace.commands.schedule import ScheduleConfig
from millrace.config import ConfigurationError, parse


def configure(arguments: str) -> ScheduleConfig:
    return parse(ScheduleConfig, arguments.split(), program="millrace schedule")[0]


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run the command in an empty folder; return its status and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def command(arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["schedule", *arguments.split()])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return command


# Output


def test_a_timeline_and_its_summary_are_printed(call):
    status, out, err = call("--schedule grouped --stages 4 --gradient-accumulation-count 8")
    assert (status, err) == (0, "")
    assert "4 stages on 4 devices, 8 micro-batches per weight update" in out
    assert "0>1>2>3>····4>····5>····6>0<<<7>1<<<" in out
    assert "time          33 forward passes; the busiest device works 24" in out
    assert "7, 5, 3, 1 micro-batches" in out


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_a_drawing_is_written_to_out(call, tmp_path, suffix):
    status, out, _ = call(f"--out drawing.{suffix}")
    assert status == 0
    assert f"drawing       drawing.{suffix}" in out
    assert [path.name for path in tmp_path.iterdir()] == [f"drawing.{suffix}"]
    assert (tmp_path / f"drawing.{suffix}").stat().st_size > 1000


def test_throughput_is_that_of_all_replicas(call):
    _, out, _ = call(
        "--stages 2 --gradient-accumulation-count 4 --stage-times 10 --backward-ratio 1 "
        "--micro-batch-size 5 --devices 8"
    )
    # 5 x 4 samples on each of 4 replicas in (4 + 2 - 1) x 20 ms.
    assert "throughput    800 samples/s with 4 replicas on 8 devices" in out


def test_gradients_are_summed_over_replicas_around_a_ring(call):
    arguments = (
        "--stages 2 --gradient-accumulation-count 4 --stage-times 10 --backward-ratio 1 "
        "--micro-batch-size 5 --parameter-bytes 1e9 --link-gbytes-per-second 50 --devices"
    )
    assert "100 ms" in call(f"{arguments} 2")[1]  # one replica: nothing to sum
    assert "130 ms" in call(f"{arguments} 8")[1]  # 2 x 3/4 x 1 GB at 50 GB/s


def test_inference_has_no_backward_and_no_update(call):
    _, out, _ = call("--inference --gradient-accumulation-count 4 --stage-times 2")
    assert "4 micro-batches of inference" in out
    assert "time  14 ms" in out
    assert "held" not in out
    assert "<" not in out


def test_devices_may_run_freely(call):
    arguments = "--schedule interleaved --gradient-accumulation-count 8 --execution"
    assert "40 forward passes" in call(f"{arguments} ticks")[1]
    assert "33 forward passes" in call(f"{arguments} free")[1]


def test_recomputation_takes_longer_and_holds_less(call):
    arguments = "--gradient-accumulation-count 8 --stored-bytes 1048576"
    _, kept, _ = call(arguments)
    _, recomputed, _ = call(f"{arguments} --recomputation --activation-bytes 1024")
    assert "33 forward passes" in kept
    assert "at most 7.0 MiB, 5.0 MiB, 3.0 MiB, 1.0 MiB" in kept
    assert "44 forward passes" in recomputed
    # The input of the first stage has no size; the second stage holds 5 inputs of 1 KiB.
    assert "at most 1.0 MiB, 1.0 MiB, 1.0 MiB, 1.0 MiB" in recomputed


# Options


def test_one_number_of_stages_is_a_row_and_several_are_positions():
    assert configure("--stages 3").placement.groups == ((0,), (1,), (2,))
    placement = configure("--stages 1 2 1 --device-mapping 0 [1,2] 0").placement
    assert placement.groups == ((0,), (1, 2), (3,))
    assert placement.device_of == (0, 1, 2, 0)


def test_the_default_count_fits_every_schedule():
    assert configure("--stages 3").num_micro_batches == 6
    assert configure("--stages 1 2 1 --schedule interleaved").num_micro_batches == 6


def test_one_value_applies_to_all_stages():
    assert configure("--stage-times 2").costs.forward == (0.002,) * 4
    assert configure("--stages 2 --stage-times 2 3").costs.backward == (0.004, 0.006)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule groupd", "Did you mean grouped?"),
        ("--stages 0", "at least one stage, and at least one at each position; got 0."),
        ("--stages 1 0", "got 1 0."),
        (f"--stages {'9' * 400}", "fits in 64 bits"),
        ("--stages 99999999999999", "stages must be at most 512, got 99,999,999,999,999"),
        ("--stages 2 --device-mapping 0 99999999999", "skips device 1: 2 devices"),
        ("--gradient-accumulation-count 999999999999", "at most 131,072 with 4 stages"),
        ("--stages 2 0 1", "at least one at each position"),
        ("--gradient-accumulation-count 12", "Use 8 or 16."),
        ("--gradient-accumulation-count 0", "positive multiple of 8"),
        ("--device-mapping 0 1", "2 entries for 4 positions"),
        ("--stages 1 2 1 --device-mapping 0 1 2", "a list of 2 devices"),
        ("--stage-times 1 2", "--stage-times has 2 values for 4 stages"),
        ("--stage-times 0", "--stage-times must be positive"),
        ("--stage-times -1", "--stage-times must be at least 0, got [-1.0]"),
        ("--stored-bytes nan", "--stored-bytes must be at least 0"),
        ("--recomputation --activation-bytes -5", "--activation-bytes must be at least 0"),
        ("--backward-ratio -1", "--backward-ratio must be at least 0"),
        ("--micro-batch-size 8", "--micro-batch-size has no effect without stage_times"),
        ("--devices 8", "devices has no effect without micro_batch_size"),
        ("--stage-times 1 --micro-batch-size 1 --devices 6", "Use 4 or 8."),
        ("--stage-times 1 --micro-batch-size 1 --devices 3", "Use 4."),
        ("--stage-times 1 --micro-batch-size 0", "--micro-batch-size must be at least 1"),
        ("--activation-bytes 5", "without link_gbytes_per_second or recomputation"),
        ("--input-bytes 5", "--input-bytes has no effect without recomputation"),
        ("--parameter-bytes 5", "--parameter-bytes has no effect without devices"),
        ("--link-gbytes-per-second 5", "without stage_times"),
        ("--stage-times 1 --link-gbytes-per-second 5", "without activation_bytes or param"),
        (
            "--stage-times 1 --activation-bytes 1 --link-gbytes-per-second -5",
            "must be positive",
        ),
        ("--weight-gradient-share 0.4", "no effect without schedule zero-bubble"),
        (
            "--schedule zero-bubble --weight-gradient-share 1.5",
            "--weight-gradient-share must be from 0 to 1",
        ),
        ("--inference --update-times 5", "--update-times has no effect in inference"),
        ("--inference --recomputation", "recomputation has no effect in inference"),
        ("--out picture.gif", "must end in .svg, .png, .html; got picture.gif"),
        ("--out nowhere/picture.svg", "There is no folder nowhere"),
        ("--stagess 4", "Did you mean --stages?"),
    ],
)
def test_an_error_is_one_line_and_status_2_before_anything_is_written(
    call, tmp_path, arguments, message
):
    status, out, err = call(arguments)
    assert status == 2
    assert message in err
    assert out == ""
    assert err.startswith("millrace: ")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_a_drawing_that_cannot_be_written_is_a_one_line_error(call, tmp_path, suffix):
    (tmp_path / f"taken.{suffix}").mkdir()
    status, _, err = call(f"--out taken.{suffix}")
    assert (status, err) == (2, f"millrace: Cannot write taken.{suffix}: Is a directory.\n")


def test_help_names_every_option(call):
    status, out, _ = call("--help")
    assert status == 0
    for option in ("--schedule", "--device-mapping", "--execution", "--parameter-bytes"):
        assert option in out


def test_the_configuration_checks_itself():
    with pytest.raises(ConfigurationError, match="multiple of 4"):
        ScheduleConfig(schedule="interleaved", gradient_accumulation_count=5)


def test_no_accelerator_library_is_imported():
    code = (
        "import sys; from millrace.cli import main\n"
        "try: main(['schedule'])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
