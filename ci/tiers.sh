#!/usr/bin/env bash
# The tests of the kernels and caches with each tier of this machine as the one that is chosen at import, and a smoke test
# of older processors under qemu. TIERS="avx2 scalar" takes these alone, without qemu. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
for tier in ${TIERS:-$(python -c 'import kvfast; print(*kvfast.available_isas())')}; do
    echo "== $tier"
    KVFAST_ISA=$tier python -m pytest -q -p no:cacheprovider tests/*/test_{threads,cache,ring,paged,fuzz_caches,fused}.py "$@"
done
if [ -z "${TIERS:-}" ] && command -v qemu-x86_64 >/dev/null; then
    python -m pytest -q -p no:cacheprovider --exhaustive tests/core/test_dispatch.py "$@"
fi
