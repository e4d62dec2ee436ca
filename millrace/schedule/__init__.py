"""Pipeline schedules: when each stage runs, and what that costs. Plain Python, no JAX."""
