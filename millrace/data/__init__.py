"""The stream: samples on the host, in NumPy. Nothing here imports JAX."""
