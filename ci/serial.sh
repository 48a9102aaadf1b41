#!/usr/bin/env bash
# A build without OpenMP, in an environment of its own, and its tests. Arguments go to pytest, instead of the whole suite.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/kvfast"
git ls-files -z | xargs -0 cp --parents -t "$work/kvfast"
python3 -m venv "$work/venv"
source "$work/venv/bin/activate"
unset PYTHONPATH
cd "$work/kvfast"
KVFAST_OPENMP=0 pip install --quiet -e ".[llama,test,bench]"
python -c 'import kvfast; assert not kvfast.has_openmp() and kvfast.get_num_threads() == 1'
python -m pytest -q -p no:cacheprovider "$@"
