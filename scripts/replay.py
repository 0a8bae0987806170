#!/usr/bin/env python
"""The trace lab: see `python scripts/replay.py --help`."""

import sys

from adaptivespec.tracelab.command import main

if __name__ == "__main__":
    sys.exit(main())
