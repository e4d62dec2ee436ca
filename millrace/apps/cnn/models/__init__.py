"""Convolutional networks. Light: ``spec`` is imported for ``--help``."""
