"""Layers, normalization and losses that the applications share."""
