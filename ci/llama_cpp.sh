#!/usr/bin/env bash
# ci/llama_cpp.sh [full] [PYTEST ARGUMENTS]: the backend for llama.cpp in a ggml that is built here, from the sources of llama-cpp-python:
# tests/llama_cpp, and ggml's own test of attention, a part of it or (`full`) all. What is built stays in build/llama_cpp.
set -euo pipefail
cd "$(dirname "$0")/.."
cases='hsk=(72|192|320|576),.*kv=113,.*nb=(3|75),mask=1,sinks=1|hsk=(40|256),.*type_K=q8_0|nr23=\[4,3\],.*nb=3,mask=1,sinks=1'
[ "${1:-}" != full ] || { cases=; shift; }
ci/need.sh cmake cmake
ci/need.sh ninja ninja-build
work=$PWD/build/llama_cpp
sources=$(ci/ggml_sources.sh)

# Any processor's instructions, and optimised only what computes for long: it is there to load the backend, and to compare with.
cat >"$work/CMakeLists.txt" <<'END_OF_FILE'
cmake_minimum_required(VERSION 3.14)
project(ggml-alone C CXX)
add_subdirectory(${SOURCES}/ggml ggml)
add_executable(test-backend-ops ${SOURCES}/tests/test-backend-ops.cpp)
target_link_libraries(test-backend-ops ggml)
target_compile_options(test-backend-ops PRIVATE -O1)
set(SLOW ops.cpp vec.cpp quants.c ggml-cpu.c arch/x86/quants.c)
list(TRANSFORM SLOW PREPEND ${SOURCES}/ggml/src/ggml-cpu/)
set_source_files_properties(${SLOW} TARGET_DIRECTORY ggml-cpu PROPERTIES COMPILE_OPTIONS -O1)
set_source_files_properties(${SOURCES}/ggml/src/ggml-quants.c TARGET_DIRECTORY ggml-base PROPERTIES COMPILE_OPTIONS -O1)
END_OF_FILE
cmake -G Ninja -S "$work" -B "$work/build" -DSOURCES="$sources" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$work/lib" \
    -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_CPU_REPACK=OFF -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_FLAGS_RELEASE=-O0 -DCMAKE_CXX_FLAGS_RELEASE=-O0 >/dev/null
ninja -C "$work/build" --quiet

backend=$(python -m kvfast llama-cpp build --source "$sources" --libraries "$work/lib")
export OMP_NUM_THREADS=2 KVFAST_TEST_GGML=$work/lib KVFAST_TEST_GGML_SOURCES=$sources
python -m pytest -q -p no:cacheprovider tests/llama_cpp --exhaustive "$@"

# It passes as well if it finds no backend of the name.
log=$work/test-backend-ops.log
GGML_BACKEND_PATH=$backend "$work/build/test-backend-ops" test -b KVFAST -o FLASH_ATTN_EXT ${cases:+-p "$cases"} >"$log" 2>&1 || grep -a FAIL "$log"
grep -a 'tests passed' "$log"
grep -aq 'Backend KVFAST: .*OK' "$log"
