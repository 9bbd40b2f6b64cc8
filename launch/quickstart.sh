#!/usr/bin/env bash
# GRPO on the built-in model, on whatever this machine has, a few minutes on two CPU cores.
# Arguments go to rljax.launch: ./launch/quickstart.sh --config.train.seed=1
set -euo pipefail
source "$(dirname "$0")/environment.sh" ""
exec "$PYTHON" -m rljax.launch "$@"
