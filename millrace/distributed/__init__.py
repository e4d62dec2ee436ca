"""Several processes as one run: launch, coordination, heartbeats and signals."""
