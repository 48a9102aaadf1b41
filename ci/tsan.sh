#!/usr/bin/env bash
# A build by clang under ThreadSanitizer, and the tests of what runs in parallel. Arguments go to pytest, instead of these.
# GNU's OpenMP has no annotations, so every barrier of it would look like a race; LLVM's tells the sanitizer of its barriers
# through Archer. As root, installs them.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/need.sh /usr/lib/llvm-16/lib/libarcher.so clang-16 llvm-16 libclang-rt-16-dev libomp-16-dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
CC=clang-16 KVFAST_OPENMP=1 KVFAST_CFLAGS="-O1 -g1 -fsanitize=thread" ci/build_copy.sh "$work"
cd "$work"
# The threads of builds without OpenMP: the sanitizer sees all of them. Forks are tested.
clang-16 -O1 -g1 -fsanitize=thread -I kvfast tests/core/thread_pool.c -o thread_pool
TSAN_OPTIONS="halt_on_error=1 die_after_fork=0" setarch -R ./thread_pool
# Python and the OpenMP runtime are not instrumented: their locks count, what they do inside does not. Forks are tested.
export PYTHONPATH=$work OMP_TOOL_LIBRARIES=/usr/lib/llvm-16/lib/libarcher.so KVFAST_NUM_THREADS=4
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1 allocator_may_return_null=1 die_after_fork=0 \
external_symbolizer_path=/usr/lib/llvm-16/bin/llvm-symbolizer"
[ $# -gt 0 ] || set -- --exhaustive tests/*/test_{threads,paged,sealed_blocks,multihead,mla,mla_paged,chosen,splits,trees,float_mode}.py \
    tests/compression/test_compression.py::test_training_is_reproducible
# Without the shuffling of addresses: the sanitizer's map of the memory has no room for all that Linux may choose.
LD_PRELOAD=$(clang-16 -print-file-name=libclang_rt.tsan-x86_64.so) \
    setarch -R "$(command -v python)" -m pytest -q -p no:cacheprovider "$@"
