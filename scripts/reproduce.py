#!/usr/bin/env python
"""The published tables, measured: see `python scripts/reproduce.py --help`."""

import sys

from adaptivespec.bench.reproduce import main

if __name__ == "__main__":
    sys.exit(main())
