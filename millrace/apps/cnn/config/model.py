"""What the CNN application can be told about its network. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.apps.cnn.families import (
    FAMILIES,
    LARGE_PICTURES,
    Size,
    check_model_name,
    find_size,
)
from millrace.apps.cnn.group_dim import check_group_dim

_NORMS = {
    "batch_norm": {"momentum", "epsilon"},
    "custom_batch_norm": {"momentum", "epsilon"},
    "group_norm": {"num_groups", "channels_per_group", "epsilon"},
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which network."""

    model_name: str | None = field(default=None, metadata={"aliases": ("--model",)})
    """Model to train: digits_cnn, toy_model, cifar_resnet8/20/32/44/56, resnet18/34/50;
    or one of the families resnet, resnext and efficientnet, which come in sizes and with
    recipes of their own (default: digits_cnn for digits, otherwise toy_model)."""
    model_size: str | None = None
    """Size of a family. resnet: 10, 14, 18, 26, 34, 50, 101, 152, or for small pictures
    8 to 110; resnext: 14, 26, 50, 101, 152, or 11 to 65; efficientnet: B0 to B7 (or just
    0 to 7) and cifar (default: 18, 14 and B0, or 20, 11 and cifar)."""
    group_dim: int | None = None
    """Channels in a group of grouped convolutions. resnext: in the first of its 32-fold
    stacks (default: 4); efficientnet: 1 is depthwise (the default), 16 is its variant
    G16 together with expand_ratio 4."""
    expand_ratio: int | None = None
    """How much wider efficientnet is inside its blocks (default: 6)."""
    pretrained: Path | None = None
    """Start from the weights in this safetensors file: of torchvision's or timm's resnet,
    resnext or efficientnet. Where its classes are not this data set's, the last layer
    starts anew."""
    norm_layer: dict[str, Any] = field(default_factory=lambda: {"name": "batch_norm"})
    """name batch_norm (momentum, epsilon) or group_norm (num_groups or
    channels_per_group, epsilon); custom_batch_norm is batch_norm."""
    bn_momentum: float = 0.97
    """Of batch norm's moving statistics, unless norm_layer gives one."""
    stable_norm: bool = False
    """Compute batch norm's variance in a second pass over the data."""
    dbn_replica_group_size: int = 1
    """Pool batch norm's statistics over groups of this many consecutive replicas."""

    def check_model_options(self, dataset: str, num_replicas: int) -> None:
        """Raise on what cannot be, or does not go together."""
        if self.model_name is not None:
            check_model_name(self.model_name)
        self._check_family(dataset)
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
        if num_replicas % self.dbn_replica_group_size:
            raise ValueError(
                f"num_replicas ({num_replicas}) cannot be divided into groups of "
                f"dbn_replica_group_size ({self.dbn_replica_group_size})."
            )

    def _check_family(self, dataset: str) -> None:
        users = {
            "model_size": FAMILIES,
            "pretrained": FAMILIES,
            "group_dim": ("resnext", "efficientnet"),
            "expand_ratio": ("efficientnet",),
        }
        for name, families in users.items():
            if getattr(self, name) is not None and self.model_name not in families:
                raise ValueError(
                    f"{name} is for --model {', '.join(families)}; got {self.model_name}."
                )
        for name in ("group_dim", "expand_ratio"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        size = self.size_for(dataset)
        if size is not None and self.group_dim is not None:
            small = dataset not in LARGE_PICTURES
            check_group_dim(size, self.group_dim, self.expand_ratio, small=small)

    def _check_norm(self) -> None:
        name = self.norm_layer.get("name")
        if name not in _NORMS:
            raise ValueError(
                f"norm_layer's name must be {' or '.join(_NORMS)}, got {name!r}."
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

    @property
    def is_family(self) -> bool:
        """Whether the model is one that comes in sizes."""
        return self.model_name in FAMILIES

    def size_for(self, dataset: str) -> Size | None:
        """The size of a family's network for a data set; None of other models."""
        if self.model_name not in FAMILIES:
            return None
        small = dataset not in LARGE_PICTURES
        return find_size(self.model_name, self.model_size, small=small)

    def network_for(self, dataset: str) -> dict[str, Any]:
        """What ``models.build`` has to know of the network besides its name."""
        if (size := self.size_for(dataset)) is None:
            return {}
        options: dict[str, Any] = {"shape": size.shape}
        if self.model_name != "efficientnet":
            options["small"] = dataset not in LARGE_PICTURES
        for name in ("group_dim", "expand_ratio"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        return options
