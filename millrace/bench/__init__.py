"""The scales: named benchmarks, against the device's limits and against PyTorch."""
