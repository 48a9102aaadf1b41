#!/usr/bin/env bash
# A build without OpenMP, which has threads of its own, and its tests. Arguments go to pytest, instead of the whole suite, with what is exhaustive.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The flags of any build: what has no parallel loops is the same, and ccache has it.
KVFAST_OPENMP=0 KVFAST_CFLAGS="" ci/build_copy.sh "$work"
cd "$work"
export PYTHONPATH=$work
python -c 'import kvfast; assert kvfast.config()["threads"] == "kvfast" and not kvfast.has_openmp()'
[ $# -gt 0 ] || set -- --exhaustive
python -m pytest -q -p no:cacheprovider "$@"
