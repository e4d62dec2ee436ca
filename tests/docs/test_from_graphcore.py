"""Every option of Graphcore's documents is in the tables and exists in the command."""

import ast
import functools
import re
from pathlib import Path

import pytest

from millrace.commands.registry import COMMANDS
from millrace.config.command_line import _build_parser, _hyphenate

PAGE = (Path(__file__).parents[2] / "docs" / "from_graphcore.md").read_text()

# The options that Graphcore's documents name, by command or document.
TENSORFLOW_2 = """
        --accelerator-side-preprocess --available-memory-proportion --bn-momentum
        --checkpoint-dir --checkpoints --clean-dir --config --config-path --config_path
        --dataset --dataset-path --dbn-replica-group-size --device-mapping
        --eight-bit-transfer --fp-exceptions --gather-conv-output --global-batch-size
        --gradient-accumulation --gradient-accumulation-count --half-partials --help
        --internal-exchange-optimization-target --l2-regularization --label-smoothing
        --logs-per-epoch --logs_per_epoch --loss-scaling --lr-schedule
        --lr-schedule-params --lr-staircase --lr-warmup-params
        --max-cross-replica-buffer-size --max-reduce-many-buffer-size --micro-batch-size
        --model --model-name --num-epochs --num-replicas --on-demand --optimizer
        --optimizer-params --optimizer-state-offloading --pipeline-num-parallel
        --pipeline-schedule --pipeline-splits --precision --recomputation --seed
        --stable-norm --stochastic-rounding --training --validation
        --validation-micro-batch-size --validation-num-replicas --wandb
        --weight-updates-per-epoch --weight_decay -h"""
TENSORFLOW_1 = """
        --base-learning-rate --batch-norm --batch-size --ckpts-per-epoch --cutmix-lambda
        --data-dir --disable-variable-offloading --eight-bit-io --enable-conv-dithering
        --enable-half-partials --epoch --epochs --expand-ratio --generated-data
        --group-dim --groups --internal-exchange-optimisation-target --mixup-alpha
        --model-size --momentum --no-dataset-cache --no-validation --normalise-input
        --optimizer --pipeline --pipeline-split --replicas --shards --standard-imagenet
        --synthetic-data --weight-avg-exp --xla-recompute"""
NAMED = {
    "cnn train": TENSORFLOW_2 + TENSORFLOW_1,
    "cnn validate": """
        --model --model-size --dataset --batch-size --synthetic-data --generated-data
        --repeat --batch-norm --enable-half-partials --precision --eight-bit-io""",
    "launch": "--num-instances --num-replicas --ipus-per-replica --numa-aware",
    "autoencoder train": """
        --base-learning-rate --batch-size --help --multiprocessing --no-prng --precision
        --size --training-data-file --validation-batch-size --validation-data-file""",
    "autoencoder sweep": "--num-ipus --base-learning-rates",
    "vcd train": "-c -r --micro_batch_size --learning_rate --help",
    "bench": "--spec --benchmark",
}


def documented_options(command: str) -> set[str]:
    """Return the options in the first column of the tables below a command."""
    parts = re.split(r"^`millrace ([a-z -]+)`", PAGE, flags=re.MULTILINE)
    options: set[str] = set()
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        if name == command:
            cells = re.findall(r"^\| (.*?) \|", text.split("\n## ")[0], re.MULTILINE)
            options |= set(re.findall(r"`(--?[a-zA-Z][\w-]*)`", " ".join(cells)))
    return options


@pytest.mark.parametrize("command", NAMED)
def test_every_option_of_the_documents_is_in_a_table(command):
    assert set(NAMED[command].split()) - documented_options(command) == set()


@pytest.mark.parametrize("command", NAMED)
def test_every_option_in_a_table_exists_in_the_command(command):
    entry = COMMANDS[command]
    config_type = entry.load_config_type()
    named = Path("runs.yml") if entry.named_configs else None
    parser = _build_parser(config_type, command, named)
    known = {flag for action in parser._actions for flag in action.option_strings}

    def is_known(option: str) -> bool:  # possibly abbreviated
        return any(flag.startswith(_hyphenate(option)) for flag in known)

    unknown = {o for o in documented_options(command) if not is_known(o)}
    assert unknown == set()


# The table of all rows and their tests

ROOT = Path(__file__).parents[2]
TABLE = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in PAGE.split("## Every row and its test")[1].splitlines()
    if line.startswith("| ") and not line.startswith(("| document", "| ---"))
]


@functools.cache
def find_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_every_row_has_a_test_that_exists(row):
    document, item, test = row
    assert document and item
    path, _, name = test.strip("`").partition("::")
    assert name.startswith("test_") and name in find_tests(ROOT / path)


LINES = [
    tuple(line.split("\t"))
    for line in (ROOT / "tests" / "seed_lines.txt").read_text().splitlines()
]
DOCUMENTS = {
    # By the name in the table: the number of the document, and options besides those of
    # its command lines.
    "autoencoder": ("000", f"{NAMED['autoencoder train']} {NAMED['autoencoder sweep']}"),
    "VCD": ("001", f"{NAMED['vcd train']} {NAMED['bench']}"),
    "CNN training": ("002", TENSORFLOW_2),
    "CNN benchmarks": ("003", f"{TENSORFLOW_1} {NAMED['cnn validate']} {NAMED['launch']}"),
}
# Other spellings of options that are there.
SAME = {
    *("--config-path", "--logs_per_epoch", "--gradient-accumulation", "--model"),
    *("--some-param", "--optimizer", "-m"),
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_option_and_program_of_a_document_is_in_its_rows(document):
    number, named = DOCUMENTS[document]
    items = " ".join(item for name, item, _ in TABLE if name == document)
    own = ("python", "poprun", "pytest")  # others prepare the reference's environment
    lines = " ".join(t for seed, t in LINES if seed == number and t.startswith(own))
    options = set(re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", f"{lines} {named}"))
    spelled = set(re.findall(r"--?[a-zA-Z][\w-]*", items))
    programs = {"poprun", "examples_utils", "pytest", *re.findall(r"\w+\.py\b", lines)}
    assert options - spelled - SAME == set()
    assert all(program in items for program in programs if program in lines)


def test_the_table_is_long_and_repeats_nothing():
    assert len(TABLE) >= 150 and len(set(TABLE)) == len(TABLE)
