# Sourced by demo.sh and test.sh: makes .venv (or the folder in ADAPTIVESPEC_VENV), installs this package into it once
# per pyproject.toml, and leaves the interpreter in $PYTHON.
# usage: source scripts/env.sh EXTRA...      (extras of pyproject.toml, for example: test)
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ADAPTIVESPEC_VENV:-$repo/.venv}
extras=$(IFS=,; echo "$*")

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or one that was left half made
  base=""
  for candidate in python3.11 python3.12 python3 python3.13; do  # the tested version first
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      base=$candidate
      break
    fi
  done
  if [ -z "$base" ]; then
    echo "found no Python 3.11 or newer; expected one as python3 on PATH; fix: install it (Debian 12, Ubuntu 24.04: apt install python3 python3-venv; Ubuntu 22.04: apt install python3.11 python3.11-venv)" >&2
    exit 1
  fi
  echo "making $venv with $("$base" --version)"
  "$base" -m venv --clear "$venv"
fi

PYTHON=$venv/bin/python
stamp=$venv/.adaptivespec-$(printf '%s %s' "$repo" "$extras" | cat - "$repo/pyproject.toml" | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  echo "installing adaptivespec[$extras] and SGLang 0.5.23: about 10 GB, five minutes and more on a slow line"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$repo[$extras]"
  touch "$stamp"
fi
export PYTHON
