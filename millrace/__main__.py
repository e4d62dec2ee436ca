"""Run the command line, as ``millrace`` or ``python -m millrace``."""

import sys

_INTERRUPTED = 130

try:
    from millrace.cli import script
except KeyboardInterrupt:  # before the command line could ask for signals
    sys.exit(_INTERRUPTED)

if __name__ == "__main__":
    script()
