"""Datasets, sources and streams of batches on the host, in NumPy; never imports JAX."""
