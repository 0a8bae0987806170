#!/usr/bin/env bash
# Makes the environment, installs, and runs every test but those marked slow. Arguments go to pytest:
#   bash scripts/test.sh                 all that CI runs
#   bash scripts/test.sh tests/unit      without servers, one to three minutes
#   bash scripts/test.sh -m slow         the long ones
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh dev
case " $* " in *" -m "*) ;; *) set -- -m "not slow" "$@" ;; esac
exec "$PYTHON" -m pytest "$@"
