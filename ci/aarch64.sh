#!/usr/bin/env bash
# ci/aarch64.sh [full] [PYTEST ARGUMENTS]: the tests of the kernels on 64-bit ARM. There as they are; on x86-64 a cross build
# under qemu-aarch64, by an arm64 Python of Debian's in build/aarch64, which nothing else of the system sees. `full`: all of
# them, on a build as wheels are; else each storage dtype against the reference, and only the kernels are optimised.
set -euo pipefail
cd "$(dirname "$0")/.."
KERNELS=$(echo --exhaustive tests/*/test_{dispatch,quant,attention,sealed_blocks,fused,cache,ring,paged,mla,compression_caches}.py)
mode=short
[ "${1:-}" != full ] || { mode=full; shift; }

if [ "$(uname -m)" = aarch64 ] || [ "$(uname -m)" = arm64 ]; then
    exec python -m pytest -q -p no:cacheprovider ${@:-$KERNELS}
fi

if ! { command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64; } >/dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update && apt-get install -y gcc-aarch64-linux-gnu qemu-user; } >/dev/null
fi
# Python's bytecode stays there, too: the emulator takes long to make it. pip makes that of the packages.
unset PYTHONPYCACHEPREFIX PYTHONDONTWRITEBYTECODE
work=$PWD/build/aarch64 root=$PWD/build/aarch64/root
mkdir -p "$work"

if [ ! -d "$root" ]; then # packages of another architecture, and a database of their own
    mkdir -p "$work"/apt/{lists,archives}/partial "$work/unpacked"
    : >"$work/apt/status"
    for command in "update" "install --yes --download-only --no-install-recommends python3 libpython3-dev libstdc++6 libgomp1"; do
        apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work/apt" -o Dir::Cache="$work/apt" \
            -o Dir::State::status="$work/apt/status" -o APT::Sandbox::User= -o Debug::NoLocking=1 $command >/dev/null
    done
    for package in "$work"/apt/archives/*.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
    # Python finds its files, and itself for a subprocess, by the name it was called by.
    cat >"$work/unpacked/usr/bin/python" <<END
#!/usr/bin/env bash
exec qemu-aarch64 -L "$root" -0 "$root/usr/bin/python" "$root/usr/bin/python3" "\$@"
END
    chmod +x "$work/unpacked/usr/bin/python"
    mv "$work/unpacked" "$root"
    rm -r "$work/apt"
fi
python=$root/usr/bin/python version=$(basename "$(readlink "$root/usr/bin/python3")")
if [ ! -d "$work/site" ]; then
    python -m pip install --quiet --compile --target "$work/downloaded" --only-binary=:all: --python-version "${version#python}" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        numpy ml_dtypes safetensors xxhash threadpoolctl hypothesis pytest setuptools
    mv "$work/downloaded" "$work/site"
fi

# Cython's C files are the same for all processors: those of a build of this machine will do, and others are written here,
# as the emulated setup.py has no Cython.
mkdir -p "$work/$mode"
{ git ls-files -z && find kvfast -name '*.c' ! -path '*/simd/*' -print0; } | sort --zero-terminated --unique |
    xargs -0 cp --parents --update --preserve=timestamps -t "$work/$mode"
cat >"$work/cc" <<'END'
#!/usr/bin/env bash
[[ " $* " == */simd/* || $MODE == full ]] || set -- "${@/#-O3/-O0}"
exec aarch64-linux-gnu-gcc "$@"
END
chmod +x "$work/cc"
audit=$PWD/ci/audit_instructions.py
cd "$work/$mode"
export PYTHONPATH=$PWD:$work/site
[ -e kvfast/core/memoryviews.c ] || PYTHONPATH='' cython --generate-shared=kvfast/core/memoryviews.c
PYTHONPATH='' cython --timestamps --shared kvfast.core.memoryviews $(find kvfast -name '*.pyx')
MODE=$mode CC=$work/cc LDSHARED="aarch64-linux-gnu-gcc -shared" CFLAGS="-I$root/usr/include -I$root/usr/include/$version" \
    "$python" setup.py -q build_ext --inplace -j "$(nproc)"
python "$audit" $(find kvfast -name "*-aarch64-linux-gnu.so")

# Kernels of NumPy's OpenBLAS for SVE set flags of errors that did not happen, so that products warn: plain ones do not.
export QEMU_CPU=max OPENBLAS_NUM_THREADS=1 OPENBLAS_CORETYPE=ARMV8
"$python" -m kvfast info
[ $# -gt 0 ] || [ $mode = short ] || set -- $KERNELS
if [ $# = 0 ]; then
    set -- tests/core/test_dispatch.py tests/attention/test_attention.py::test_tiers_agree
    for shape in "64, 127, 1, 3, 9" "17, 65, 65, 2, 6" "80, 128, 5, 1, 16"; do
        set -- "$@" "tests/attention/test_attention.py::test_every_dtype_and_size[neon"{,_dotprod,_i8mm,_bf16}"-($shape)]"
    done
fi
"$python" -m pytest -q -p no:cacheprovider "$@"
