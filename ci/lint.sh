#!/usr/bin/env bash
# ruff on Python, with its formatter, cython-lint on Cython, clang-format on the C that it understands (see .clang-format), and words.py
# on all prose. Then tabs, blanks at the end of a line, and in C lines of more than 136 columns, which these do not find.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check --quiet .
cython-lint kvfast
python ci/words.py
clang-format --dry-run -Werror kvfast/simd/{coding/layout.inc,coding/seal.inc,vectors/pq.inc,vectors/rows.inc,isa/vec_scalar}.h kvfast/attention/walk/*.h \
    kvfast/core/thread_pool.h tests/core/thread_pool.c
if git grep -nIP '\t| +$' -- '*.h' '*.c' '*.py' '*.pyi' '*.pyx' '*.pxd' '*.sh' || git grep -nIP '^.{137}' -- 'kvfast/simd' 'kvfast/attention/walk' 'kvfast/core/*.h'; then
    echo "a tab, blanks at the end of a line, or a long line: see above"
    exit 1
fi
for script in .ci/run ci/*.sh; do bash -n "$script"; done
