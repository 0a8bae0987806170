#!/usr/bin/env python
"""Decoders under load: see `python scripts/load.py --help`."""

import sys

from adaptivespec.bench.load import main

if __name__ == "__main__":
    sys.exit(main())
