"""How long OpenMP's threads wait awake for their next work. Imported before anything that loads OpenMP.

GNU's runtime lets them spin for 300,000 rounds, which are milliseconds, and takes that time from the threads of the BLAS that
a model runs between two calls of `attend`. Without any, calls of `attend` that follow each other directly wait for threads to
wake. ROUNDS lies between; bench/studies/bench_torch.py shows both cases. A GOMP_SPINCOUNT or OMP_WAIT_POLICY of the user stays.
"""

import os

NAME = "GOMP_SPINCOUNT"
ROUNDS = 3000
IS_OURS = NAME not in os.environ and "OMP_WAIT_POLICY" not in os.environ

if IS_OURS:
    os.environ[NAME] = str(ROUNDS)
try:
    # Nothing of it is used here: it loads the runtime, which reads the variable now and never again.
    import kvfast.core.threads  # noqa: F401
finally:
    if IS_OURS:
        del os.environ[NAME]
