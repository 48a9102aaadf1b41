#!/usr/bin/env bash
# ci/test_wheel.sh WHEEL SDIST [PYTEST ARGUMENTS]: the test suite of an sdist against an installed wheel. The sources are
# away, and no compiler is on the PATH. PYTHON names the interpreter.
set -euo pipefail
wheel=$(realpath "$1") sdist=$(realpath "$2")
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
mkdir "$work/bin" "$work/suite"
for tool in bash env sh git uname cat rm mkdir cp ls sleep true qemu-x86_64 objdump; do
    found=$(command -v $tool) && ln -s "$found" "$work/bin/$tool"
done
tar -xzf "$sdist" -C "$work/suite" --strip-components=1
rm -rf "$work/suite/kvfast" "$work/suite"/*.egg-info
export PATH=$work/venv/bin:$work/bin
unset PYTHONPATH
for compiler in cc gcc clang c++ g++; do
    if command -v $compiler; then echo "a compiler is on the PATH"; exit 1; fi
done
pip install --quiet --only-binary kvfast "kvfast[llama,test,bench] @ file://$wheel"
cd "$work/suite"
python -c 'import kvfast; print("testing", kvfast.__file__); assert "site-packages" in kvfast.__file__; kvfast.show_config()'
python -m pytest -q -p no:cacheprovider "$@"
