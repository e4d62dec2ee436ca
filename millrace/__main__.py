"""Run the command line as ``python -m millrace``."""

from millrace.cli import script

if __name__ == "__main__":
    script()
