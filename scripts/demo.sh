#!/usr/bin/env bash
# Makes the environment, installs, prepares the demo pair, and measures decoders on real SGLang servers:
#   bash scripts/demo.sh             under 15 minutes after installation on two quiet cores
#   bash scripts/demo.sh --quick     under 4
#   bash scripts/demo.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh demo
exec "$PYTHON" scripts/demo.py "$@"
