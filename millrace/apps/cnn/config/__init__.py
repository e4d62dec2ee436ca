"""What ``millrace cnn train`` can be told. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

from millrace.apps.cnn.config import graphcore
from millrace.apps.cnn.config.data import DEFAULT_IMAGE_SIZE, DataOptions
from millrace.apps.cnn.config.device import DeviceOptions
from millrace.apps.cnn.config.graphcore import ShorthandOptions
from millrace.apps.cnn.config.ipu import IpuOptions
from millrace.apps.cnn.config.model import ModelOptions
from millrace.apps.cnn.config.training import RecipeOptions
from millrace.apps.cnn.config.workflow import WorkflowOptions
from millrace.plan import Plan
from millrace.run.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class CnnConfig(
    ModelOptions,
    RecipeOptions,
    DataOptions,
    WorkflowOptions,
    Plan,
    DeviceOptions,
    RunOptions,
    ShorthandOptions,
    IpuOptions,
):
    """Train a convolutional network for image classification."""

    expand_options = staticmethod(graphcore.expand_options)

    def __post_init__(self) -> None:
        if self.auto_loss_scaling:
            self._scale_loss_dynamically()
        if self.validation is None:
            wanted = self.synthetic_data is None or not self.training
            object.__setattr__(self, "validation", wanted)
            object.__setattr__(self, "skips_validation", not wanted)
        RunOptions.__post_init__(self)
        Plan.__post_init__(self)
        self.check_model_options(self.resolved_dataset, self.num_replicas)
        self.check_recipe(self.micro_batch_size, checkpoints=self.checkpoints)
        self.check_workflow()
        self.check_data_options(self.resolved_dataset)
        self.check_device_options()
        self.check_ipu_options(self.num_stages)
        if self.pretrained is not None and not self.training:
            raise ValueError("pretrained is where training starts, and training is off.")
        if self.resume and not self.checkpoints:
            raise ValueError("resume needs a checkpoint to go on from; checkpoints is off.")
        if self.fused_preprocessing and not self.accelerator_side_preprocess:
            raise ValueError(
                "fused_preprocessing is about preparing images on the device, so "
                "accelerator_side_preprocess must be on as well."
            )

    def _scale_loss_dynamically(self) -> None:
        if self.loss_scaling not in (0, "dynamic"):
            raise ValueError(
                "Give auto_loss_scaling or a fixed loss_scaling, not both; got "
                f"loss_scaling {self.loss_scaling}."
            )
        object.__setattr__(self, "loss_scaling", "dynamic")  # frozen from here on

    @property
    def resolved_dataset(self) -> str:
        """The data set, worked out from the model where it is not given."""
        if self.dataset == "gc-imagenet":
            return "imagenet"
        small = self.model_name in (None, "digits_cnn")
        return self.dataset or ("digits" if small else "cifar10")

    @property
    def resolved_model(self) -> str:
        """The model, worked out from the data set where it is not given."""
        digits = self.resolved_dataset == "digits"
        return self.model_name or ("digits_cnn" if digits else "toy_model")

    @property
    def model_title(self) -> str:
        """The model as a user would call it."""
        size = self.size_for(self.resolved_dataset)
        return f"{self.resolved_model} {size.name}" if size else self.resolved_model

    @property
    def network(self) -> dict[str, Any]:
        """What ``models.build`` has to know besides the model's name."""
        return self.network_for(self.resolved_dataset)

    @property
    def resolved_image_size(self) -> int:
        """The side that pictures of any size are cropped to."""
        size = self.size_for(self.resolved_dataset)
        usual = size.image_size if size else DEFAULT_IMAGE_SIZE
        return self.image_size or usual
