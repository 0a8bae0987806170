#!/usr/bin/env bash
# Makes the environment, installs, prepares the demo pair, and measures decoders on real SGLang servers:
#   bash scripts/demo.sh             9.5 minutes on two cores after installation
#   bash scripts/demo.sh --quick     3.5
#   bash scripts/demo.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh demo
exec "$PYTHON" scripts/demo.py "$@"
