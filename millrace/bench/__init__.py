"""Named benchmarks, compared with the roofline of the device and with PyTorch."""
