"""What every room stands on, and what knows no token.

The table of kernels (the one door to `simd`), threads (the one door to OpenMP, or to the system's), array arguments, checks
of numbers, interrupts, overwriting of memory, and what the machine can do.
"""
