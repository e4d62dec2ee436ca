"""The command registry, and the commands that belong to no application."""
