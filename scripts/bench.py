#!/usr/bin/env python
"""The benchmark: see `python scripts/bench.py --help`."""

import sys

from adaptivespec.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
