#!/usr/bin/env bash
# ci/bundle_backend.sh TREE...: puts kvfast's backend for llama.cpp into copies of the sources, for the wheels that are built there next.
set -euo pipefail
cd "$(dirname "$0")/.."
sources=$(ci/ggml_sources.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
cp -r "$1" "$work/copy" # building leaves files
"$work/venv/bin/pip" install --quiet "$work/copy"
cd "$work"
for tree in "$@"; do
    venv/bin/python - "$sources" "$tree" <<'END_OF_PROGRAM'
import sys
from pathlib import Path

from kvfast.engines.llama_cpp.building import build_bundled
from kvfast.engines.llama_cpp.installed import bundled

source, tree = sys.argv[1:]
build_bundled(source, Path(tree, "kvfast", "engines", "llama_cpp", bundled().name))
END_OF_PROGRAM
done
