#!/usr/bin/env bash
# The test suite that CI runs; --all adds the tests marked slow. Other arguments go to pytest.
set -euo pipefail
extras="[test,jetstream]" marks=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  extras="[test,jetstream,reasoning-gym]" marks=()
  shift
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "$extras"
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${marks[@]}" "$@"
