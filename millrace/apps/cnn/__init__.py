"""Image classification with convolutional networks."""
