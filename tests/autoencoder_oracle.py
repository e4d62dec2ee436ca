"""The autoencoder and its update in NumPy, float64, differentiated by hand."""

import numpy as np

SCALE, ALPHA = 1.0507009873554805, 1.6732632423543772
LAYERS = ("fc_1", "fc_2", "fc_3")


def selu(x):
    return SCALE * np.where(x > 0, x, ALPHA * np.expm1(np.minimum(x, 0)))


def selu_slope(x):
    return SCALE * np.where(x > 0, 1, ALPHA * np.exp(np.minimum(x, 0)))


class Pass:
    """A forward pass through the network that can be differentiated.

    `kept` is the factor on each value of the code: 0 where it is dropped.
    """

    def __init__(self, params, rows, kept=1.0, active=True):
        self.params, self.kept, self.active = params, kept, active
        self.inputs, self.sums = [], []
        x = rows
        for name in LAYERS:
            x = self._layer(x, params["encoder"][name], params["encoder"][name]["kernel"])
        x = x * kept
        for name, mirrored in zip(LAYERS, reversed(LAYERS), strict=True):
            own = params["decoder"][name]
            kernel = own.get("kernel", params["encoder"][mirrored]["kernel"].T)
            x = self._layer(x, own, kernel)
        self.output = x

    def _layer(self, x, own, kernel):
        self.inputs.append((x, kernel))
        self.sums.append(x @ kernel + own["bias"])
        return selu(self.sums[-1]) if self.active else self.sums[-1]

    def backward(self, slope, gradients):
        """Add to the gradients; return the gradient of the rows."""
        places = [("encoder", name) for name in LAYERS]
        places += [("decoder", name) for name in LAYERS]
        for number in reversed(range(6)):
            if self.active:
                slope = slope * selu_slope(self.sums[number])
            x, kernel = self.inputs[number]
            part, name = places[number]
            gradients[part][name]["bias"] += slope.sum(0)
            if "kernel" in gradients[part][name]:
                gradients[part][name]["kernel"] += x.T @ slope
            else:
                gradients["encoder"][LAYERS[5 - number]]["kernel"] += slope.T @ x
            slope = slope @ kernel.T
            if number == 3:
                slope = slope * self.kept
        return slope


def zeros_like(params):
    if isinstance(params, dict):
        return {name: zeros_like(entry) for name, entry in params.items()}
    return np.zeros_like(params)


def known_loss(rows, output):
    """Return the loss over the known ratings, and its gradient."""
    known, count = rows != 0, max(1, (rows != 0).sum())
    error = np.where(known, output - rows, 0)
    return (error**2).sum() / count, 2 * error / count


def loss_and_gradients(params, rows, kept, refeeding, active=True, seen=1.0):
    """Return the loss, the reported RMSE, the gradients and the output of a batch.

    `seen` is the factor on each rating that enters the network: 0 where it is hidden.
    """
    gradients = zeros_like(params)
    first = Pass(params, seen * rows, kept[0], active)
    loss, slope = known_loss(rows, first.output)
    rmse = np.sqrt(loss)
    if refeeding == "joint":
        second = Pass(params, first.output, kept[1], active)
        error = second.output - first.output
        loss += (error**2).mean()
        slope_of_error = 2 * error / error.size
        slope = slope - slope_of_error + second.backward(slope_of_error, gradients)
    first.backward(slope, gradients)
    return loss, rmse, gradients, first.output


def update(params, velocity, gradients, *, rate, decay=1e-4, momentum=0.9, clip=None):
    """Return new weights and velocity."""
    if isinstance(params, dict):
        pairs = {
            name: update(
                params[name], velocity[name], gradients[name],
                rate=rate, decay=decay, momentum=momentum, clip=clip,
            )
            for name in params
        }  # fmt: skip
        return (
            {n: p for n, (p, _) in pairs.items()},
            {n: v for n, (_, v) in pairs.items()},
        )
    gradient = gradients + decay * params
    if clip is not None:
        gradient = np.clip(gradient, -clip, clip)
    velocity = momentum * velocity + gradient
    return params - rate * velocity, velocity
