#!/usr/bin/env bash
# ci/build_copy.sh FOLDER: a copy of the tracked files, built in place there. CC, KVFAST_OPENMP and KVFAST_CFLAGS hold; without
# the last a warning ends the build. With FOLDER as PYTHONPATH, the Python at hand takes kvfast from it. Needs the extra `test`.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
git ls-files -z | xargs -0 cp --parents -t "$1"
# What Cython has written for a build in place, if no source is newer, need not be written again. Copied last, it is the newest.
newest=$(git ls-files -z 'kvfast/*.pyx' 'kvfast/*.pxd' | xargs -0 ls -t | sed -n 1p)
find kvfast -name '*.c' ! -path '*/simd/*' -newer "$newest" -exec cp --parents -t "$1" {} +
cd "$1"
export KVFAST_CFLAGS="${KVFAST_CFLAGS--Wall -Wextra -Werror}"
python setup.py -q build_ext --inplace
