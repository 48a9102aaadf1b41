#!/usr/bin/env bash
# ci/test_wheel.sh FOLDER [PYTEST ARGUMENTS]: the test suite of the folder's sdist against its wheel for this Python, installed. The sources
# are away, and no compiler is on the PATH. PYTHON names the interpreter; REPORT a file for what `bench` measures before.
set -euo pipefail
cd "$1"
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
mkdir "$work/bin" "$work/suite"
tar -xzf ./*.tar.gz -C "$work/suite" --strip-components=1
rm -rf "$work/suite/kvfast" "$work/suite"/*.egg-info
if [ -d "$work/venv/Scripts" ]; then # on Windows, where the tools of bash need the libraries next to them
    PATH=$work/venv/Scripts:/usr/bin:/mingw64/bin:$(cygpath "$SYSTEMROOT")/System32
else
    for tool in bash env sh git dirname uname cat rm mkdir cp ls sleep true qemu-x86_64 objdump; do
        found=$(type -P $tool) && ln -s "$found" "$work/bin/$tool"
    done
    PATH=$work/venv/bin:$work/bin
fi
unset PYTHONPATH
for compiler in cc gcc clang c++ g++; do
    if command -v $compiler; then echo "a compiler is on the PATH"; exit 1; fi
done
python -m pip download --quiet --no-deps --no-index --find-links . --only-binary :all: --dest "$work/wheel" kvfast
cd "$work/wheel"
pip install --quiet --only-binary kvfast "$(ls ./*.whl)[llama,test,bench]"
cd "$work/suite"
python -c 'import kvfast; print("testing", kvfast.__file__); assert "site-packages" in kvfast.__file__; kvfast.show_config()'
[ -z "${REPORT:-}" ] || python -m kvfast bench --short --report "$REPORT"
python -m pytest -q -p no:cacheprovider "$@"
