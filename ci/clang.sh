#!/usr/bin/env bash
# Builds by gcc and by clang, where a warning of -Wall -Wextra ends the build, and tests of the last. COMPILERS="clang-16"
# takes it alone. Arguments go to pytest, instead of the tests of kernels and caches. As root, installs clang.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/need.sh clang-16 clang-16 libomp-16-dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for compiler in ${COMPILERS:-gcc clang-16}; do
    echo "== $compiler"
    CC=$compiler KVFAST_OPENMP=1 ci/build_copy.sh "$work/$compiler"
done
cd "$work/$compiler"
export PYTHONPATH=$PWD
[ $# -gt 0 ] || set -- tests/test_{dispatch,threads,quant,cache,attention,paged,ring,fused,matrix}.py
python -m pytest -q -p no:cacheprovider "$@"
