"""Trained models as files that other programs load."""
