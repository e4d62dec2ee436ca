"""Runs in object storage: a working copy on this machine, and what keeps both equal."""
