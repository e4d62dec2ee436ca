"""Options of ``millrace cnn train``. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any, ClassVar

from millrace.apps.cnn.config.augmentation import AugmentationOptions, Basics
from millrace.apps.cnn.config.data import IMAGE_FILES, DataOptions
from millrace.apps.cnn.config.graphcore import GraphcoreTrainingOptions
from millrace.apps.cnn.config.model import ModelOptions
from millrace.apps.cnn.config.recipe import expand_training_options, start_from_named
from millrace.apps.cnn.config.training import RecipeOptions, WorkflowOptions
from millrace.apps.cnn.models.spec import Size, check_group_dim, has_small_images
from millrace.plan import Plan
from millrace.run.options import RunOptions

ARRAYS = "arrays"
"""The name of a dataset of arrays that were passed from Python."""
_DEFAULT_IMAGE_SIZE = 224
_MIN_TOY_SIZE = 16
"""Height and width from which toy_model is the default for arrays."""


@dataclass(frozen=True, kw_only=True)
class CnnConfig:
    """Train a convolutional network for image classification."""

    common_options: ClassVar = (
        *("model_name", "model_size", "pretrained", "dataset", "dataset_path"),
        *("recipe", "optimizer", "learning_rate", "lr_schedule", "warmup_epochs"),
        *("weight_decay", "clip_norm", "ema", "label_smoothing"),
        *("augment", "mixup"),
        *("num_epochs", "micro_batch_size", "num_replicas", "precision"),
        *("validation", "run_dir", "resume", "seed", "tensorboard", "quiet", "debug"),
    )

    default_texts: ClassVar = dict.fromkeys(
        (
            *("optimizer", "learning_rate", "lr_schedule", "warmup_epochs"),
            *("num_epochs", "micro_batch_size", "precision", "norm_layer"),
            *("label_smoothing", "random_erasing", "l2_regularization"),
        ),
        "by recipe",
    )

    model: ModelOptions = ModelOptions()
    recipe: RecipeOptions = RecipeOptions()
    data: DataOptions = DataOptions()
    augmentation: AugmentationOptions = AugmentationOptions()
    workflow: WorkflowOptions = WorkflowOptions()
    plan: Plan = Plan()
    run: RunOptions = RunOptions()
    graphcore: GraphcoreTrainingOptions = GraphcoreTrainingOptions()

    expand_options = staticmethod(expand_training_options)
    start_from_named = staticmethod(start_from_named)

    def __post_init__(self) -> None:
        """Check what crosses sections; each section has checked itself."""
        self._check_model()
        self._check_data()
        self._check_augmentation()
        self._check_workflow()
        self.graphcore.check_memory_proportion(self.plan.num_stages)

    def _check_model(self) -> None:
        size, group_dim = self.size, self.model.group_dim
        if size is not None and group_dim is not None:
            small = has_small_images(self.resolved_dataset)
            check_group_dim(size, group_dim, self.model.expand_ratio, small=small)
        replicas, group = self.plan.num_replicas, self.model.dbn_replica_group_size
        if replicas % group:
            raise ValueError(
                f"num_replicas ({replicas}) cannot be divided into groups of "
                f"dbn_replica_group_size ({group})."
            )

    def _check_data(self) -> None:
        if has_small_images(dataset := self.resolved_dataset):
            if not self.data.normalize_input:
                raise ValueError(
                    "normalize_input is for imagenet and imagefolder; images of "
                    f"{dataset} are always scaled."
                )
            if self.data.image_size is not None:
                raise ValueError(
                    f"image_size is for imagenet and imagefolder; images of {dataset} "
                    "keep their size."
                )
        is_cifar = (dataset or "").startswith("cifar")
        if self.data.normalize_channels and not is_cifar:
            raise ValueError(
                f"normalize_channels is for cifar10 and cifar100, not for {dataset}."
            )
        if self.workflow.resident_data:
            self._check_resident_data(dataset)
        if self.graphcore.fused_preprocessing and not self.data.accelerator_side_preprocess:
            raise ValueError(
                "fused_preprocessing is for preprocessing on the device, so "
                "accelerator_side_preprocess must be on as well."
            )

    def _check_resident_data(self, dataset: str) -> None:
        if not has_small_images(dataset):
            raise ValueError(
                "resident_data is for images in memory, but those of "
                f"{dataset} are decoded from files as they are needed."
            )
        if self.data.synthetic is not None:
            raise ValueError(
                "Give resident_data or synthetic_data, not both: synthetic images of the "
                "device stay there anyway."
            )
        if not self.data.accelerator_side_preprocess:
            raise ValueError(
                "resident_data keeps unprocessed images on the device, so "
                "accelerator_side_preprocess must be on as well."
            )

    def _check_augmentation(self) -> None:
        dataset, options, recipe = self.resolved_dataset, self.augmentation, self.recipe
        options.check_dataset(dataset, self._side_of_arrays)
        if options.changes_pixels and not self.scales_on_device:
            name = "color_jitter" if options.num_ops == 0 else f"augment {options.augment}"
            raise ValueError(
                f"{name} changes images on the device before they are scaled, so "
                "accelerator_side_preprocess must be on as well."
            )
        if options.alternating_flip and not self.data.accelerator_side_preprocess:
            raise ValueError(
                "alternating_flip mirrors images on the device, so "
                "accelerator_side_preprocess must be on as well."
            )
        arrays = self.data.arrays
        if options.changes_pixels and arrays and arrays["types"]["image"] != "uint8":
            raise ValueError(
                "augment and color_jitter change bytes, from 0 to 255, but the images are "
                f"{arrays['types']['image']}: pass them as uint8."
            )
        if options.mixes_samples and recipe.mixes_samples:
            raise ValueError(
                "Give mixup and cutmix, or mixup_alpha and cutmix_lambda: they blend "
                "samples in different ways and cannot be combined."
            )
        micro_batch = self.plan.micro_batch_size
        if self.mixes_samples and micro_batch < 2:
            names = "mixup and cutmix"
            if recipe.mixes_samples:
                names = "mixup_alpha and cutmix_lambda"
            raise ValueError(
                f"{names} blend the samples of a micro-batch, so "
                f"micro_batch_size must be at least 2, got {micro_batch}."
            )

    def _check_workflow(self) -> None:
        if self.model.pretrained is not None and not self.workflow.training:
            raise ValueError("pretrained is for training, but training is off.")
        if self.workflow.checkpoints:
            return
        if self.recipe.averages_weights:
            raise ValueError(
                "weight_avg_exp and weight_avg_n average checkpoints, but checkpoints is "
                "off."
            )
        if self.run.may_resume:
            raise ValueError("resume needs a checkpoint, but checkpoints is off.")

    def cache_notices(self) -> list[str]:
        """Return a notice if a cache is turned off that the run would not have."""
        has_cache = self.resolved_dataset in IMAGE_FILES and not self.data.synthetic
        if not self.data.no_dataset_cache or (has_cache and self.workflow.validation):
            return []
        return [
            "--no-dataset-cache has no effect: only the validation images of imagenet and "
            "imagefolder are kept in memory once they are decoded."
        ]

    @property
    def resolved_dataset(self) -> str:
        """The dataset, derived from the model if it is not given."""
        if self.data.arrays is not None:
            return ARRAYS
        if self.data.dataset == "gc-imagenet":
            return "imagenet"
        small = self.model.model_name in (None, "digits_cnn")
        return self.data.dataset or ("digits" if small else "cifar10")

    @property
    def schedule_params(self) -> dict[str, Any]:
        """The parameters of the learning rate schedule, with the length of its decay."""
        recipe, epochs = self.recipe, self.workflow.num_epochs
        params = recipe.lr_schedule_params
        decays = recipe.lr_schedule in ("cosine", "polynomial", "exponential")
        if recipe.learning_rate is None or not decays:
            return params
        warmup = recipe.lr_warmup_params or {}
        is_shifted = warmup.get("warmup_mode") == "shift"
        shifted = warmup.get("warmup_epochs", 0) if is_shifted else 0
        after = epochs - shifted if epochs > shifted else epochs
        return {"epochs_to_total_decay": after} | params

    @property
    def logs_like_graphcore(self) -> bool:
        """Whether logs may be at uneven updates, as in the families' application."""
        return self.model.is_family and self.recipe.recipe != "modern"

    @property
    def scales_on_device(self) -> bool:
        """Whether images are sent unscaled: always if they are decoded from files."""
        decoded = not has_small_images(self.resolved_dataset)
        return decoded or self.data.accelerator_side_preprocess

    @property
    def sends_bytes(self) -> bool:
        """Whether images are sent as bytes."""
        decoded = not has_small_images(self.resolved_dataset)
        return decoded or self.data.eight_bit_transfer

    @property
    def mixes_samples(self) -> bool:
        """Whether samples of a micro-batch are blended."""
        return self.recipe.mixes_samples or self.augmentation.mixes_samples

    @property
    def basics(self) -> Basics:
        """The crops and flips of training images."""
        return self.augmentation.basics(self.resolved_dataset, self._side_of_arrays)

    @property
    def _side_of_arrays(self) -> int | None:
        """The smaller of height and width of arrays from Python; None for a dataset."""
        if self.data.arrays is None:
            return None
        return min(self.data.arrays["shapes"]["image"][1:3])

    @property
    def resolved_model(self) -> str:
        """The model, derived from the dataset if it is not given."""
        digits = self.resolved_dataset == "digits"
        if (side := self._side_of_arrays) is not None:
            digits = side < _MIN_TOY_SIZE
        return self.model.model_name or ("digits_cnn" if digits else "toy_model")

    @property
    def size(self) -> Size | None:
        """The size of a family; None for other models."""
        return self.model.find_size(self.resolved_dataset)

    @property
    def model_title(self) -> str:
        """The name of the model, with its size."""
        size = f" {self.size.name}" if self.size else ""
        return f"{self.resolved_model}{size}"

    @property
    def network(self) -> dict[str, Any]:
        """The options of ``catalog.build_layers`` that depend on the family."""
        if self.size is None:
            return {}
        options: dict[str, Any] = {"shape": self.size.shape}
        if self.model.model_name != "efficientnet":
            options["small"] = has_small_images(self.resolved_dataset)
        for name in ("group_dim", "expand_ratio"):
            if (value := getattr(self.model, name)) is not None:
                options[name] = value
        return options

    @property
    def resolved_image_size(self) -> int:
        """The height and width that large images are cropped to."""
        default = self.size.image_size if self.size else _DEFAULT_IMAGE_SIZE
        return self.data.image_size or default
