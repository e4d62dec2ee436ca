"""Options of the model. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any

from millrace.apps.cnn.models.spec import (
    FAMILIES,
    Size,
    check_model_name,
    find_size,
    has_small_images,
)
from millrace.config import flag

_NORMS = {
    "batch_norm": {"momentum", "epsilon"},
    "custom_batch_norm": {"momentum", "epsilon"},
    "group_norm": {"num_groups", "channels_per_group", "epsilon"},
}
_OF_NORM = {
    "stable_norm": "group norm always computes the variance in a second pass",
    "dbn_replica_group_size": "group norm normalizes each sample on its own",
    "gather_conv_output": "group norm normalizes each sample on its own",
}
"""Options of batch norm, and why group norm does not need them."""
_FAMILIES_WITH = {
    "model_size": FAMILIES,
    "pretrained": FAMILIES,
    "group_dim": ("resnext", "efficientnet"),
    "expand_ratio": ("efficientnet",),
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model options."""

    model_name: str | None = field(default=None, metadata={"aliases": ("--model",)})
    """Model: digits_cnn, toy_model, cifar_resnet8/20/32/44/56, resnet9, resnet18_small
    and speednet(_wide) for small images, resnet18/34/50, or resnet, resnext and
    efficientnet, which have sizes (default: by recipe and dataset)."""
    model_size: str | None = None
    """Size of a family. resnet: 10, 14, 18, 26, 34, 50, 101, 152, or 8 to 110 for small
    images; resnext: 14, 26, 50, 101, 152, or 11 to 65 for small images; efficientnet: B0
    to B7 (or 0 to 7) and cifar (default: 18, 14 and B0; 20, 11 and cifar for small
    images)."""
    group_dim: int | None = None
    """Channels per group of grouped convolutions. resnext: in the first stack (default:
    4); efficientnet: 1 is depthwise (the default), 16 with expand_ratio 4 is the variant
    G16."""
    expand_ratio: int | None = None
    """Expansion ratio of efficientnet blocks (default: 6)."""
    pretrained: str | None = None
    """Weights to start from: a resnet, resnext or efficientnet from torchvision or timm. A
    safetensors file, the folder of an export, a URL, or the name of a repository on Hugging
    Face such as timm/resnet50.a1_in1k. If its classes are not those of the dataset, the
    last layer starts from random weights."""
    norm_layer: dict[str, Any] = field(default_factory=lambda: {"name": "batch_norm"})
    """Normalization: name batch_norm (momentum, epsilon) or group_norm (num_groups or
    channels_per_group, epsilon); custom_batch_norm is the same as batch_norm."""
    bn_momentum: float = 0.97
    """Momentum of batch norm's moving statistics, unless norm_layer sets one."""
    stable_norm: bool = False
    """Compute the variance of batch norm in a second pass over the data, as that of group
    norm always is."""
    dbn_replica_group_size: int = 1
    """Number of consecutive replicas that share batch norm statistics."""
    gather_conv_output: bool | None = None
    """Exchange the statistics of dbn_replica_group_size once per norm, mean and variance
    together, and combine them on each replica."""

    def __post_init__(self) -> None:
        if self.model_name is not None:
            check_model_name(self.model_name)
        self._check_family_options()
        self._check_norm()
        if not 0 <= self.bn_momentum < 1:
            raise ValueError(
                f"bn_momentum must be at least 0 and below 1, got {self.bn_momentum}."
            )
        if self.dbn_replica_group_size < 1:
            raise ValueError(
                "dbn_replica_group_size must be at least 1, got "
                f"{self.dbn_replica_group_size}."
            )

    def _check_family_options(self) -> None:
        for name, families in _FAMILIES_WITH.items():
            if getattr(self, name) is not None and self.model_name not in families:
                raise ValueError(
                    f"{name} is for --model {', '.join(families)}; got {self.model_name}."
                )
        for name in ("group_dim", "expand_ratio"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")

    def _check_norm(self) -> None:
        name = self.norm_layer.get("name")
        if name not in _NORMS:
            raise ValueError(
                f"The name in norm_layer must be {' or '.join(_NORMS)}, got {name!r}."
            )
        unknown = set(self.norm_layer) - _NORMS[name] - {"name"}
        if unknown:
            raise ValueError(
                f"norm_layer {name} takes {', '.join(sorted(_NORMS[name]))}; got "
                f"{', '.join(sorted(unknown))} as well."
            )
        groups = {"num_groups", "channels_per_group"} & set(self.norm_layer)
        if name == "group_norm" and len(groups) != 1:
            raise ValueError(
                "norm_layer group_norm needs num_groups or channels_per_group, and only "
                f"one of them; got {', '.join(sorted(groups)) or 'neither'}."
            )

    def notices(self) -> list[str]:
        """Return notices about options that have no effect with this norm."""
        options = ModelOptions(norm_layer=self.norm_layer)
        given = [name for name in _OF_NORM if getattr(self, name) != getattr(options, name)]
        if self.norm_layer["name"] == "group_norm":
            return [f"{flag(name)} has no effect: {_OF_NORM[name]}." for name in given]
        if self.gather_conv_output and self.dbn_replica_group_size == 1:
            return [
                "--gather-conv-output has no effect: the replicas share no statistics "
                "(--dbn-replica-group-size)."
            ]
        return []

    @property
    def is_family(self) -> bool:
        """Whether the model comes in sizes."""
        return self.model_name in FAMILIES

    def find_size(self, dataset: str) -> Size | None:
        """Return the size of a family for a dataset; None for other models."""
        if self.model_name not in FAMILIES:
            return None
        return find_size(self.model_name, self.model_size, small=has_small_images(dataset))
