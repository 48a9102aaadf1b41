#!/usr/bin/env bash
# A build whose matrix unit is software, for machines with AVX-512 VBMI but no AMX, and the tests of attention on the tier amx.
# Arguments go to pytest, instead of these.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Only two files know of the matrix unit; the others are compiled as in any build, which ccache has done.
cat >"$work/cc" <<END
#!/usr/bin/env bash
for word; do
    [[ \$word != *simd/tiers/avx512_vbmi.c && \$word != *simd/dispatch.c ]] || exec gcc "\$@" -include "$work/tests/support/software_amx.h"
done
exec gcc "\$@"
END
chmod +x "$work/cc"
CC="$work/cc $(python -c 'import sysconfig; print(*sysconfig.get_config_var("CC").split()[1:])')" KVFAST_CFLAGS="" ci/build_copy.sh "$work"
cd "$work"
export PYTHONPATH=$work
if ! python -c 'import sys, kvfast; sys.exit("amx" not in kvfast.available_isas())'; then
    echo "skipped: this processor has no AVX-512 VBMI, or no x86-64"
    exit
fi
[ $# -gt 0 ] || set -- tests/attention tests/*/test_{cache,fused,mla}.py
KVFAST_ISA=amx python -m pytest -q -p no:cacheprovider "$@"
