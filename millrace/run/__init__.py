"""Runs of commands: directory, console, writers and metadata."""
