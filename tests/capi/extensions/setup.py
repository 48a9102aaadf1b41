"""Builds both against the kvfast that Python imports."""

from setuptools import Extension, setup

import kvfast

include = [kvfast.get_include()]
setup(
    name="kvfast-runtimes",
    version="0",
    py_modules=[],
    ext_modules=[
        Extension("runtime_in_c", ["runtime_in_c.c"], include_dirs=include, extra_compile_args=["-O1", "-Wall", "-Werror"]),
        Extension("runtime_in_cython", ["runtime_in_cython.pyx"], include_dirs=include, extra_compile_args=["-O1"]),
    ],
)
