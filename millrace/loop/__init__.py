"""Loops on the host around compiled programs: training, evaluation, repeat."""
