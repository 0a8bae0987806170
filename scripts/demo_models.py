"""Prepare the demo pair and print one JSON line, {"target": folder, "draft": folder}, as the last line of stdout."""

import argparse
import json
import sys

from adaptivespec.command_line import run_main
from adaptivespec.demo.draft import draft_folder
from adaptivespec.demo.target import prepare_target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="ADAPTIVESPEC_CACHE names the cache folder (default ~/.cache/adaptivespec)."
    )
    parser.parse_args()
    print(json.dumps({"target": str(prepare_target()), "draft": str(draft_folder())}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
