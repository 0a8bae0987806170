"""Prepare the demo pair and print one JSON line, {"target": folder, "draft": folder}, as the last line of stdout."""

import argparse
import json
import sys

from adaptivespec.demo.draft import draft_folder
from adaptivespec.demo.target import prepare_target
from adaptivespec.errors import AdaptiveSpecError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="ADAPTIVESPEC_CACHE names the cache folder (default ~/.cache/adaptivespec)."
    )
    parser.parse_args()
    try:
        target = prepare_target()
    except AdaptiveSpecError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"target": str(target), "draft": str(draft_folder())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
