# Sourced by the other scripts: makes .venv in the checkout, installs rljax with the extras in $1, sets $PYTHON.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=.venv/bin/python
if [ ! -x "$PYTHON" ]; then
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -m venv .venv
      break
    fi
  done
  [ -x "$PYTHON" ] || { echo "error: no Python of version 3.11 or later found (tried python3, python3.11 to python3.14)" >&2; exit 1; }
fi
# Installing again after a change of pyproject.toml or another set of extras; otherwise nothing to do.
wanted="$(cksum pyproject.toml)"
if [ "$(cat ".venv/installed$1" 2>/dev/null)" != "$wanted" ]; then
  echo "installing rljax$1 into .venv: a minute or two, about 1.3 GB (with jetstream 3.6 GB)"
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".$1"
  echo "$wanted" > ".venv/installed$1"
fi
