"""Every option of the documents is in the table, and is what a command understands."""

import re
from pathlib import Path

import pytest

from millrace.commands.registry import COMMANDS
from millrace.config.command_line import _build_parser, _hyphenate

PAGE = (Path(__file__).parents[2] / "docs" / "from_graphcore.md").read_text()

# What Graphcore's documents name, command by command.
NAMED = {
    "cnn train": """
        --accelerator-side-preprocess --available-memory-proportion --bn-momentum
        --checkpoint-dir --checkpoints --clean-dir --config --config-path --config_path
        --dataset --dataset-path --dbn-replica-group-size --device-mapping
        --eight-bit-transfer --fp-exceptions --gather-conv-output --global-batch-size
        --gradient-accumulation --gradient-accumulation-count --half-partials --help
        --internal-exchange-optimisation-target --l2-regularization --label-smoothing
        --logs-per-epoch --logs_per_epoch --loss-scaling --lr-schedule
        --lr-schedule-params --lr-staircase --lr-warmup-params
        --max-cross-replica-buffer-size --max-reduce-many-buffer-size --micro-batch-size
        --model --model-name --num-epochs --num-replicas --on-demand --optimizer
        --optimizer-params --optimizer-state-offloading --pipeline-num-parallel
        --pipeline-schedule --pipeline-splits --precision --recomputation --seed
        --stable-norm --stochastic-rounding --training --validation
        --validation-micro-batch-size --validation-num-replicas --wandb
        --weight-updates-per-epoch --weight_decay -h
        --base-learning-rate --batch-norm --batch-size --ckpts-per-epoch --cutmix-lambda
        --data-dir --disable-variable-offloading --eight-bit-io --enable-conv-dithering
        --enable-half-partials --epoch --epochs --expand-ratio --generated-data
        --group-dim --groups --internal-exchange-optimisation-target --mixup-alpha
        --model-size --momentum --no-dataset-cache --no-validation --normalise-input
        --optimizer --pipeline --pipeline-split --replicas --shards --standard-imagenet
        --synthetic-data --weight-avg-exp --xla-recompute""",
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


def told(command: str) -> set[str]:
    """The options in the first column of the tables after a command's name."""
    parts = re.split(r"^`millrace ([a-z -]+)`", PAGE, flags=re.MULTILINE)
    found: set[str] = set()
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        if name == command:
            cells = re.findall(r"^\| (.*?) \|", text.split("\n## ")[0], re.MULTILINE)
            found |= set(re.findall(r"`(--?[a-zA-Z][\w-]*)`", " ".join(cells)))
    return found


@pytest.mark.parametrize("command", NAMED)
def test_every_option_of_the_documents_is_in_the_table(command):
    assert set(NAMED[command].split()) - told(command) == set()


@pytest.mark.parametrize("command", NAMED)
def test_every_option_in_the_table_is_one_that_the_command_has(command):
    entry = COMMANDS[command]
    config_type = entry.load_config_type()
    named = Path("runs.yml") if entry.named_configs else None
    parser = _build_parser(config_type, command, named)
    known = {word for action in parser._actions for word in action.option_strings}

    def is_known(option: str) -> bool:  # cut short is understood too
        return any(word.startswith(_hyphenate(option)) for word in known)

    assert {option for option in told(command) if not is_known(option)} == set()
