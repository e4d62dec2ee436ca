"""GPU kernels for training many small models at once."""
