"""Command lines of Graphcore's documents: verbatim, and as options of ``cnn train``."""

import re
from pathlib import Path

LINES = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
]
"""Document and line."""


def find_line(start: str) -> str:
    """Return the only line that begins with these words."""
    (found,) = (line for _, line in LINES if line.startswith(start))
    return found


def training_options(line: str) -> str:
    """Return the options of a line with train.py, with the replicas of poprun."""
    launcher, _, options = line.partition("train.py ")
    replicas = re.search(r"--num-replicas[ =](\d+)", launcher)
    return options + (f" --replicas {replicas[1]}" if replicas else "")


GRAPHCORE = {"recipe": "graphcore"}
"""Turns modern defaults off, for tests of something else."""

_LOGGING = (
    "--model cifar_resnet8 --num-epochs {} --precision 16.16 --micro-batch-size 8 "
    "--validation False --half-partials True --gradient-accumulation 8 --logs-per-epoch {}"
)
_RESNET = (
    "--model resnet --model-size 50 --dataset imagenet --data-dir datasets/ "
    "--ckpts-per-epoch 0 --batch-size 16 {} --epochs 1 --no-validation --xla-recompute "
    "--optimiser momentum --momentum 0.9 --normalise-input --stable-norm "
    "--internal-exchange-optimisation-target balanced --enable-half-partials "
    "--standard-imagenet --pipeline-num-parallel 32 --pipeline-schedule Grouped "
    "--no-dataset-cache --shards=4 --pipeline-splits b1/2/relu b2/3/relu b3/3/relu "
    "--pipeline --batch-norm --available-memory-proportion 0.15 "
    "--disable-variable-offloading --precision 16.32 --eight-bit-io"
)
_RESNEXT = (
    "--model resnext --model-size 101 --dataset imagenet --data-dir datasets "
    "--shards 2 {} --pipeline-splits b3/3/relu --epoch 2 --ckpts-per-epoch 0 "
    "--xla-recompute --normalise-input --internal-exchange-optimisation-target balanced "
    "--enable-half-partials --stable-norm --base-learning-rate -11 "
    "--pipeline-schedule Grouped --optimiser momentum --momentum 0.9 "
    "--lr-schedule cosine --label-smoothing 0.1 --no-validation "
    "--disable-variable-offloading --eight-bit-io"
)
_EFFICIENTNET = (
    "--model=efficientnet --model-size=4 --data-dir datasets/ --precision=16.32 "
    "--group-dim=16 --expand-ratio=4 --dataset=imagenet --groups=4 --optimizer=RMSprop "
    "--lr-schedule=exponential --xla-recompute --enable-conv-dithering "
    "--available-memory-proportion=0.15 --pipeline-schedule Grouped "
    "--internal-exchange-optimisation-target balanced --weight-avg-exp 0.97 "
    "--enable-half-partials --cutmix-lambda 0.85 --mixup-alpha=0.2 "
    "--disable-variable-offloading --batch-size=5 --shards=4 "
    "--pipeline-split block2c block4c block6a --pipeline "
    "--gradient-accumulation-count=40 --no-validation --epochs {}"
)

SEED_LINES = (
    "--model cifar_resnet8 --wandb --num-epochs 11 --precision 16.16 "
    "--micro-batch-size 32 --dataset-path datasets/",
    "--model-name cifar_resnet8 --pipeline-splits conv2_block1_post_addition_relu "
    "conv3_block1_post_addition_relu conv4_block1_post_addition_relu "
    "--device-mapping 0 1 2 3 --gradient-accumulation-count 8 --recomputation True",
    *(_LOGGING.format(6, logs) for logs in (1, 2, 10, 0.5, 0)),
    _LOGGING.format(5, 0.5),
    "--accelerator-side-preprocess True --eight-bit-transfer True",
    "--accelerator-side-preprocess False --dataset gc-imagenet --dataset-path "
    "datasets/imagenet-data --gradient-accumulation-count 8 --micro-batch-size 8",
    _RESNET.format("--replicas 1 --gradient-accumulation-count 1024"),
    _RESNET.format("--gradient-accumulation-count 256 --replicas 4"),
    _RESNEXT.format(
        "--replicas 2 --batch-size 6 --pipeline --gradient-accumulation-count 64"
    ),
    _RESNEXT.format(
        "--replicas 8 --batch-size 6 --pipeline --gradient-accumulation-count 16"
    ),
    _EFFICIENTNET.format(2),
    _EFFICIENTNET.format(1) + " --replicas 4",
)
"""All but ``python3 train.py`` alone, which trains with the modern recipe."""
