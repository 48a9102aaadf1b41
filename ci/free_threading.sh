#!/usr/bin/env bash
# A build for a free-threaded Python, 3.13 or newer, and its tests. Arguments go to pytest, instead of these.
# FREE_THREADED_PYTHON says which, else python3.14t or python3.13t is taken. Where there is none, as root on Debian, it is
# built from Debian's source package (some 5 minutes), and kept in ~/.cache/kvfast for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${XDG_CACHE_HOME:-$HOME/.cache}/kvfast/python3.13t
python=${FREE_THREADED_PYTHON:-$(command -v python3.14t || command -v python3.13t || echo "$prefix/bin/python3.13t")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ ! -x "$python" ]; then
    ci/need.sh /usr/include/ffi.h libffi-dev
    ci/need.sh /usr/include/zlib.h zlib1g-dev
    ci/need.sh /usr/include/openssl/ssl.h libssl-dev
    # A list of packages of its own: what is installed on this system stays of its own release.
    mkdir -p "$work"/apt/lists/partial "$work"/apt/cache/archives/partial
    site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -1)
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site trixie main" > "$work/apt/sources.list"
    options=(-q -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
             -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root)
    (cd "$work" && apt-get "${options[@]}" update && apt-get "${options[@]}" source --download-only python3.13)
    tar -xf "$work"/python3.13_*.orig.tar.xz -C "$work"
    (cd "$work"/Python-3.13* && ./configure -q --disable-gil --prefix="$prefix" && make -s -j"$(nproc)" && make -s install) > "$work/log" 2>&1 ||
        { tail -50 "$work/log"; exit 1; }
fi

"$python" -m venv "$work/environment"
source "$work/environment/bin/activate"
python -c 'import sys; assert not sys._is_gil_enabled(), "this Python has a GIL"; print(sys.version)'
# The newest with a wheel for this Python, rather than the newest.
pip install --quiet --prefer-binary "cython>=3.1,<3.3" "setuptools>=80" numpy pytest hypothesis ml_dtypes threadpoolctl
KVFAST_CFLAGS="" ci/build_copy.sh "$work/copy"
cd "$work/copy"
export PYTHONPATH=$PWD
# A module that does not say that it needs no GIL brings it back, with a warning: the end of any test.
python -c 'import sys, kvfast, kvfast.compression; assert not sys._is_gil_enabled()'
# All but what needs safetensors or sentencepiece, which have no wheel for it: files and models.
[ $# -gt 0 ] || set -- --exhaustive tests/*/test_{threads,processes,interrupt,hostile,memory,security,quant,cache,paged,ring,mla,mla_paged,multihead,fused,\
sealed_blocks,explain,formats,capi,batches,refusals}.py \
    tests/fuzz/test_fuzz_caches.py::test_each_kind_of_cache[{BlocksWorld,SplicedWorld,Twins}-400] \
    --deselect tests/guarantees/test_memory.py::test_every_allocation_of_the_modules \
    --deselect tests/caches/test_mla.py::test_going_back_and_keeping --deselect tests/caches/test_mla_paged.py::test_between_paged_and_contiguous \
    --deselect tests/storage/test_sealed_blocks.py::test_same_bytes_whatever_the_way \
    --deselect tests/codec/test_formats.py::TestRefusals::test_snapshots_of_other_formats --deselect tests/capi/test_capi.py::test_the_wheel_has_all_that_is_needed
python -m pytest -q -p no:cacheprovider "$@"
