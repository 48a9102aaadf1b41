#!/usr/bin/env bash
# ci/ggml_sources.sh: fetches the sources of llama.cpp that kvfast's backend is built for and tested with, those of a llama-cpp-python,
# into build/llama_cpp, unless they are there. Prints their folder.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${LLAMA_CPP_PYTHON:-0.3.36} # any from 0.3.30 on
work=$PWD/build/llama_cpp
sources=$work/sources-$version/vendor/llama.cpp
if [ ! -e "$sources/tests/test-backend-ops.cpp" ]; then
    mkdir -p "$work/sources-$version"
    python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" "llama-cpp-python==$version" >&2
    tar -xzf "$work"/llama_cpp_python-$version.tar.gz -C "$work/sources-$version" --strip-components 1 --wildcards \
        '*/vendor/llama.cpp/ggml/*' '*/vendor/llama.cpp/tests/test-backend-ops.cpp'
    rm "$work"/llama_cpp_python-$version.tar.gz
fi
echo "$sources"
