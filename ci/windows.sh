#!/usr/bin/env bash
# Kernels and modules as 64-bit Windows gets them: by clang in its GNU dialect, with mingw-w64. Under wine, a driver holds the kernels to
# what those of the build in place compute (tests/simd/kernel_vectors.c), and sees that they keep the registers that Windows says; the
# threads of builds without OpenMP are tried there, too. The modules are compiled with the headers of this Python and ci/windows/pyconfig.h, and linked: they must need no library but Windows' own.
# Nothing runs them, as there is no Python for Windows here. QUICK=1 only has clang read all sources. As root, installs what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/need.sh clang-16 clang-16
ci/need.sh /usr/x86_64-w64-mingw32/include/windows.h mingw-w64-x86-64-dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
cp -rs "$headers" "$work/include"
rm "$work/include/pyconfig.h"
cp ci/windows/pyconfig.h "$work/include"
clang="clang-16 --target=x86_64-w64-mingw32 -Wall -Wextra -Werror -I kvfast -I $work/include"
modules="$(git ls-files 'kvfast/*.pyx' | sed 's/pyx$/c/') kvfast/core/memoryviews.c"
kernels=$(git ls-files 'kvfast/simd/*.c')
each() { xargs -P "$(nproc)" -I {} "$@"; } # each COMMAND...: with {} for a line of the input
if [ -n "${QUICK:-}" ]; then
    printf '%s\n' $modules $kernels tests/simd/kernel_vectors.c tests/core/thread_pool.c | each $clang -fsyntax-only {}
    exit
fi
ci/need.sh x86_64-w64-mingw32-gcc gcc-mingw-w64-x86-64-win32
ci/need.sh wine wine wine64

# Files of all folders in one.
object='$0 "$@" -c $file -o $OBJECTS/$(echo ${file%.c} | tr / .).o'
mkdir "$work/kernels" "$work/modules"
release=$(sed -nE 's/^COMPILE = \[(.*)\]$/\1/p' setup.py | tr -d '",')
printf '%s\n' $kernels tests/simd/kernel_vectors.c | OBJECTS=$work/kernels each bash -c "file={}; $object" $clang $release
printf '%s\n' $modules | OBJECTS=$work/modules each bash -c "file={}; $object" $clang -O0
clang="$clang -L $(dirname "$(x86_64-w64-mingw32-gcc -print-libgcc-file-name)")"

$clang "$work"/kernels/*.o -o "$work/kernel_vectors.exe"
python tests/simd/kernel_vectors.py "$work/vectors"
export WINEPREFIX=$work/wine WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml="
(cd "$work" && wine kernel_vectors.exe vectors)
$clang -O2 tests/core/thread_pool.c -o "$work/thread_pool.exe"
wine "$work/thread_pool.exe"

# A library that has every name of Python that the modules import.
cd "$work/modules"
{ printf 'LIBRARY python3.dll\nEXPORTS\n' && x86_64-w64-mingw32-nm -u ./*.o | sed -nE 's/^ +U (__imp_)?(_?Py\w+)$/\2/p' | sort -u; } >python.def
x86_64-w64-mingw32-dlltool -d python.def -l libpython.a
mv kvfast.core.kernels.o ../kernels
rm ../kernels/tests.*
mkdir linked
$clang -shared ../kernels/*.o -L . -lpython -o linked/kvfast.core.kernels.pyd
ls ./*.o | each $clang -shared {} -L . -lpython -o linked/{}.pyd
libraries=$(for module in linked/*; do x86_64-w64-mingw32-objdump -p "$module"; done | sed -n 's/.*DLL Name: //p' | sort -u | xargs)
echo "$(ls linked | wc -l) modules, which need $libraries"
[ "$libraries" = "KERNEL32.dll msvcrt.dll python3.dll" ]
