"""Convolutional networks for image classification."""
