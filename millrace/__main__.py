"""``python -m millrace``: the command line where its script is not on the path."""

from millrace.cli import script

if __name__ == "__main__":
    script()
