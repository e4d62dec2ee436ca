"""Small CNNs for demonstrations and tests."""

from millrace.nn import layers
from millrace.nn.layers import Layer
from millrace.nn.norms import NormFactory


def digits_cnn(num_classes: int, norm: NormFactory) -> list[Layer]:
    """Return three convolutions for 8 x 8 images; 24,058 parameters for ten classes."""
    model: list[Layer] = []
    for number, (features, strides) in enumerate([(16, 1), (32, 2), (64, 2)], 1):
        model += [
            layers.conv(f"conv{number}", features, strides=strides),
            norm(f"conv{number}_bn"),
            layers.relu(f"conv{number}_relu"),
        ]
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("fc_layer", num_classes),
    ]


def toy_model(num_classes: int, norm: NormFactory) -> list[Layer]:
    """Return two convolutions with large pools; 242 parameters for CIFAR-10."""
    del norm
    model: list[Layer] = []
    for number, (features, kernel) in enumerate([(4, 3), (8, 1)]):
        model += [
            layers.conv(f"conv2d_{number}", features, kernel, padding="VALID", bias=True),
            layers.relu(f"conv2d_{number}_relu"),
            layers.max_pool(f"max_pooling2d_{number}", 5, 5),
        ]
    return [*model, layers.flatten("flatten"), layers.dense("dense", num_classes)]
