"""One run: its directory, console, writers and provenance."""
