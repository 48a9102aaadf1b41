"""How long OpenMP's threads wait awake for their next work. Imported before anything that loads OpenMP.

GNU's runtime lets them spin for 300,000 rounds, which are 15 ms where a pause takes 140 cycles, and takes that time from
the threads of the BLAS that a model runs between two calls of `attend`: decoding SmolLM2-135M at 6,000 tokens took
250 ms a token on two cores, and 39 ms with 3,000 rounds. With none, `attend` calls that follow each other directly took
1.6 times as long. Who sets GOMP_SPINCOUNT or OMP_WAIT_POLICY is left alone.
"""

import os

NAME = "GOMP_SPINCOUNT"
IS_OURS = NAME not in os.environ and "OMP_WAIT_POLICY" not in os.environ

if IS_OURS:
    os.environ[NAME] = "3000"
try:
    # Nothing of it is used here: it loads the runtime, which reads the variable now and never again.
    import kvfast.core.threads  # noqa: F401
finally:
    if IS_OURS:
        del os.environ[NAME]
