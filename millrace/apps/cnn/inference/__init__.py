"""``millrace cnn validate``: throughput, latency and accuracy of inference."""
