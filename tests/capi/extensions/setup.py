"""Builds all of them against the kvfast that Python imports."""

from setuptools import Extension, setup

import kvfast

include = [kvfast.get_include()]
threads = ["-fopenmp"] if kvfast.has_openmp() else ["-Wno-unknown-pragmas"]
setup(
    name="kvfast-runtimes",
    version="0",
    py_modules=[],
    ext_modules=[
        Extension("runtime_in_c", ["runtime_in_c.c"], include_dirs=include, extra_compile_args=["-O1", "-Wall", "-Werror"]),
        Extension(
            "engine_in_c",
            ["engine_in_c.c"],
            include_dirs=include,
            extra_compile_args=["-O3", "-Wall", "-Werror", *threads],
            extra_link_args=threads[: kvfast.has_openmp()],
        ),
        Extension("batches_in_cython", ["batches_in_cython.pyx"], include_dirs=include, extra_compile_args=["-O1"]),
        Extension("runtime_in_cython", ["runtime_in_cython.pyx"], include_dirs=include, extra_compile_args=["-O1"]),
    ],
)
