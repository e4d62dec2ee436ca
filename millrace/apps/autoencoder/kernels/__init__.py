"""Pallas kernels that train many small models at once on a GPU."""
