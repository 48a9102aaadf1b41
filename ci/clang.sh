#!/usr/bin/env bash
# Builds by gcc and by clang, where a warning of -Wall -Wextra ends the build, and tests of the last. Arguments go to pytest,
# instead of the tests of kernels and caches. QUICK=1 has clang read what a build in place left and compile the kernels, and tests nothing.
# As root, installs clang.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/need.sh clang-16 clang-16
ci/need.sh /usr/lib/llvm-16/lib/libomp.so libomp-16-dev
if [ -n "${QUICK:-}" ]; then
    headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    flags="-Wall -Wextra -Werror -fopenmp -I kvfast -I $headers"
    printf '%s\n' $(git ls-files "kvfast/*.pyx" | sed "s/pyx$/c/") | xargs -n 1 -P "$(nproc)" clang-16 -fsyntax-only $flags
    # clang can crash where it writes instructions, too.
    printf '%s\n' kvfast/simd/{dispatch,tiers/*}.c | xargs -n 1 -P "$(nproc)" clang-16 -O1 -c -o /dev/null $flags
    exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for compiler in gcc clang-16; do
    echo "== $compiler"
    CC=$compiler KVFAST_OPENMP=1 ci/build_copy.sh "$work/$compiler"
done
cd "$work/$compiler"
export PYTHONPATH=$PWD
[ $# -gt 0 ] || set -- --exhaustive tests/*/test_{dispatch,threads,quant,cache,attention,paged,ring,fused,matrix}.py
python -m pytest -q -p no:cacheprovider "$@"
