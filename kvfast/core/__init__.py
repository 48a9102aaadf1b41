"""What every room stands on. Knows no token.

- kernels: the kernel table of the tier in use, the one door to `simd`
- limits: sizes and limits of `simd/limits.h`
- slow_paths: notes on calls that are slower than they could be
- threads, thread_pool, workers: the number of threads, the loop that they share, a pool without OpenMP, threads for Python calls
- spin, interrupt, flags, system: idle threads, Ctrl-C, who may enter, names of operating systems
- arrays, dlpack, interchange, checks: array and number arguments, checked and opened
- scratch, wipe: working memory of threads, memory that is overwritten
- hardware, numa, prefetching: bandwidth and peak arithmetic, memory nodes, the cache level that prefetches fill
- file_lock, replacing: locks of files, files that appear complete
- capabilities, text: names that another library must have, sizes for reading
"""
