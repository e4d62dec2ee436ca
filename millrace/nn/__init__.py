"""The parts: layers and losses that the applications share."""
