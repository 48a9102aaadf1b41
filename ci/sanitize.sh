#!/usr/bin/env bash
# A build under AddressSanitizer and UndefinedBehaviorSanitizer, where whatever they find ends the process, and its tests.
# Arguments go to pytest, instead of the whole suite, with what is exhaustive.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# With all checks gcc was not done with the kernels after 4 minutes, with these in less than 2: null pointers and wrong
# objects AddressSanitizer sees itself; a wrong alignment does no harm on x86. No warnings: what is put in between makes gcc
# see variables without a value. Optimised are the kernels alone: in the rest it takes gcc longer than it saves the tests.
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize-address-use-after-scope
-fno-sanitize=null,alignment,object-size,pointer-overflow"
export KVFAST_CFLAGS="-O0 -g1 -fno-omit-frame-pointer -w ${sanitizers//$'\n'/ }"
# Tests that are named run on these tiers, unless they are exhaustive; the others are compiled as in any build, which ccache has done.
export TESTED=all
[ $# = 0 ] || [[ " $* " == *" --exhaustive "* ]] || TESTED=$(python -c 'import kvfast; print(kvfast.available_isas()[0], "avx2 scalar")')
export TESTED=${TESTED/amx/avx512_vbmi}
cat >"$work/cc" <<'END'
#!/usr/bin/env bash
kept=()
for word; do
    [[ $word == *simd/tiers/*.c ]] || continue
    tier=$(basename "$word" .c)
    [[ " $TESTED " == *" all "* || " $TESTED " == *" ${tier#fast_} "* ]] && level=-O1 || plain=1
done
for word; do [[ ${plain:-} && " $KVFAST_CFLAGS " == *" $word "* ]] || kept+=("$word"); done
exec gcc "${kept[@]}" ${level:-}
END
chmod +x "$work/cc"
# With the other words of the usual compiler, or ccache has nothing.
CC="$work/cc $(python -c 'import sysconfig; print(*sysconfig.get_config_var("CC").split()[1:])')" ci/build_copy.sh "$work"
cd "$work"
export PYTHONPATH=$work
# Python's own allocator hands out memory that the sanitizer does not see. What Python itself never frees is not a leak of
# ours, and requests for more memory than there is are tested. C++ libraries throw only if the sanitizer finds libstdc++.
export PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so.6)"
# All but five: qemu has no room for the sanitizer's 20 TB of shadow, in which nobody can look for a key either; its malloc
# is the one that another test would replace, and keeps for a while what is freed.
[ $# -gt 0 ] || set -- --exhaustive --deselect tests/core/test_dispatch.py::test_older_cpus --deselect tests/core/test_dispatch.py::test_refused_by_older_cpus \
    --deselect tests/guarantees/test_memory.py::test_nothing_leaks \
    --deselect tests/guarantees/test_security.py::test_nothing_stays_in_the_memory_of_the_process \
    --deselect tests/guarantees/test_memory.py::test_every_allocation_of_the_modules
python -m pytest -q -p no:cacheprovider "$@"
