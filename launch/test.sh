#!/usr/bin/env bash
# The test suite that CI runs; --all adds the tests marked slow. Other arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh" "[test]"
marks=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  marks=()
  shift
fi
exec "$PYTHON" -m pytest -n 2 --dist loadfile "${marks[@]}" "$@"
