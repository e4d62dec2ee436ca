"""The sluices: which stage of a pipeline works when. Plain Python, no JAX."""
