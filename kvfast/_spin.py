"""How long OpenMP's threads wait awake for their next work. Imported before anything that loads OpenMP.

GNU's runtime lets them spin for 300,000 rounds, which are 15 ms where a pause takes 140 cycles, and takes that time from
the threads of the BLAS that a model runs between two calls of `attend`: decoding SmolLM2-135M at 6,000 tokens took
250 ms a token on two cores, and 39 ms with 3,000 rounds. With none, `attend` calls that follow each other directly took
1.6 times as long. Who sets GOMP_SPINCOUNT or OMP_WAIT_POLICY is left alone.
"""

import os

NAME = "GOMP_SPINCOUNT"

if NAME in os.environ or "OMP_WAIT_POLICY" in os.environ:
    from . import _openmp  # noqa: F401
else:
    os.environ[NAME] = "3000"
    try:
        from . import _openmp  # noqa: F401  (loads the runtime, which reads the variable now and never again)
    finally:
        del os.environ[NAME]
