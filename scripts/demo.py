"""The demo: see `python scripts/demo.py --help`."""

import sys

from adaptivespec.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
