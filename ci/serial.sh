#!/usr/bin/env bash
# A build without OpenMP, and its tests. Arguments go to pytest, instead of the whole suite.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Cython's parallel loops keep the number of their threads in a variable that only OpenMP reads.
KVFAST_OPENMP=0 KVFAST_CFLAGS=-Wno-unused-but-set-variable ci/build_copy.sh "$work"
cd "$work"
export PYTHONPATH=$work
python -c 'import kvfast; assert not kvfast.has_openmp() and kvfast.get_num_threads() == 1'
python -m pytest -q -p no:cacheprovider "$@"
