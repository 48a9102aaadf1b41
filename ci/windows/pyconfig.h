/* What Python.h of CPython for 64-bit Windows is told of its system, so that ci/windows.sh can compile modules against the headers of
   another system's Python, which apart from this file are the same. Only names that these headers and Cython's code read. */
#ifndef Py_CONFIG_H
#define Py_CONFIG_H
#define MS_WINDOWS
#define MS_WIN32
#define MS_WIN64
#define NT_THREADS
#define Py_ENABLE_SHARED 1    /* names of Python are imported from its library */
#define HAVE_DECLSPEC_DLL
#define HAVE_SSIZE_T 1
#define STDC_HEADERS 1
#define HAVE_STDDEF_H 1
#define HAVE_ERRNO_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TYPES_H 1
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_FPOS_T 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define ALIGNOF_SIZE_T 8
#endif
