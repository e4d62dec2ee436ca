"""Checkpoints, written atomically and verified when they are read."""
