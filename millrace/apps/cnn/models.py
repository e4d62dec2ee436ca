"""CNNs as lists of named layers."""

from millrace.nn import layers
from millrace.nn.layers import Layer
from millrace.nn.norms import batch_norm


def build(name: str, num_classes: int) -> list[Layer]:
    """Return the layers of a model by name."""
    return {"digits_cnn": digits_cnn}[name](num_classes)


def digits_cnn(num_classes: int) -> list[Layer]:
    """Three convolutions for pictures of 8 x 8; 24,058 parameters for ten classes."""
    model: list[Layer] = []
    for number, (features, strides) in enumerate([(16, 1), (32, 2), (64, 2)], 1):
        model += [
            layers.conv(f"conv{number}", features, strides=strides),
            batch_norm(f"conv{number}_bn", momentum=0.9),
            layers.relu(f"conv{number}_relu"),
        ]
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("fc_layer", num_classes),
    ]
