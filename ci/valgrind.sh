#!/usr/bin/env bash
# ci/smoke.py under valgrind, which ends it at what was never written or is not ours. It knows no AVX-512, and does not say
# to programs that the processor has it: they take AVX2. As root, installs valgrind where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
ci/need.sh valgrind valgrind
# Python's own allocator looks at memory that is not its own to tell whose it is. NumPy's threads are of no use here.
export PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1
# The zeros of a file's header are made here in a way that valgrind follows, see valgrind.supp.
valgrind --quiet --error-exitcode=1 --suppressions=ci/valgrind.supp "$(command -v python)" -c "
import json, runpy
json.JSONDecoder.__init__.__kwdefaults__['parse_int'] = lambda digits: int(digits) if digits != '0' else 0
json._default_decoder = json.JSONDecoder()
runpy.run_path('ci/smoke.py')"
