#!/usr/bin/env bash
# A build in which software takes the place of the instructions that this processor lacks: of the matrix unit where there is AVX-512
# VBMI, else of all AVX-512 and AVX-VNNI, too. Then the tests of kernels and attention on these tiers. TIERS="avx512 amx" takes these
# alone; arguments go to pytest, instead of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -m)" != x86_64 ]; then
    echo "skipped: no x86-64"
    exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tiers="amx avx512_vbmi avx512_vnni avx512 avx_vnni"
instead="-include $work/software_tiers.h -O1 -Wno-psabi" # -O3 would take minutes
{
    echo '#include "tests/support/software_avx512.h"'
    grep -rhoE '_mm512_\w+|_mm256_(movepi16_mask|dpwssd_avx_epi32|dpbusd_avx_epi32)' kvfast/simd | sort -u | sed -E 's/_mm[0-9]+_(.*)/#undef &\n#define & software_\1/'
    echo '#include "tests/support/software_amx.h"'
} >"$work/software_tiers.h"
if python -c 'import sys, kvfast; sys.exit("avx512_vbmi" not in kvfast.available_isas())'; then
    tiers=amx instead="-include $work/tests/support/software_amx.h"
fi
# Only the tiers and what chooses them know of these instructions; the other files are compiled as in any build, which ccache has done.
cat >"$work/cc" <<END
#!/usr/bin/env bash
for word; do
    case \$word in
    */*avx512.c | */*avx512_vnni.c | */*avx512_vbmi.c | */fast_amx.c | */*avx_vnni.c | *simd/dispatch.c) exec gcc "\$@" $instead ;;
    esac
done
exec gcc "\$@"
END
chmod +x "$work/cc"
CC="$work/cc $(python -c 'import sysconfig; print(*sysconfig.get_config_var("CC").split()[1:])')" KVFAST_CFLAGS="" ci/build_copy.sh "$work"
cd "$work"
export PYTHONPATH=$work
[ $# -gt 0 ] || set -- tests/attention tests/*/test_{cache,fused,mla}.py
for tier in ${TIERS:-$tiers}; do
    echo "== $tier"
    KVFAST_ISA=$tier python -m pytest -q -p no:cacheprovider "$@"
done
