/* The storage dtypes, one row each. A row has all that kvfast knows of a dtype apart from its kernels. C reads
   kv_dtypes[KV_INT4], Cython does so through core/kernels.pxd, and Python has the same rows in kvfast.codec.dtypes.

     KV_        the position of a row is its number and never changes: add new rows at the end
     name       in Python and in files; rows with the same name are one dtype with several codebooks
     family     how the dtype is stored; see kernels.h and packed.h
     bits       of an element
     scale      bytes of a token's scale: 4 in float32, 2 in bfloat16
     levels     number of values that an element can have under one scale; 0: a float
     limit      largest magnitude that can be stored. Scale times level must not overflow: a scale is rounded, and a level
                can stand for an element that is smaller
     prepare_, scores_, accumulate_   its kernels in the kernel table
     also       other names
     codebooks, options   those of KVFormat that the dtype allows */
#ifndef KVFAST_DTYPES_H
#define KVFAST_DTYPES_H

#include "limits.h"

/*      KV_       name        family        bits scale levels limit          prepare_  scores_ and accumulate_
        also                      codebooks           options */
#define KV_DTYPES(ROW)                                                                                                \
    ROW(FLOAT32,  "float32",  FLOAT_ROWS,   32,  0,    0, KV_MAX_FLOAT32,  floating, float32,                         \
        "f32 fp32 float single",  "",                 "")                                                             \
    ROW(FLOAT16,  "float16",  FLOAT_ROWS,   16,  0,    0, KV_MAX_FLOAT16,  floating, float16,                         \
        "f16 fp16 half",          "",                 "")                                                             \
    ROW(BFLOAT16, "bfloat16", FLOAT_ROWS,   16,  0,    0, KV_MAX_BFLOAT16, floating, bfloat16,                        \
        "bf16",                   "",                 "")                                                             \
    ROW(INT8,     "int8",     TILED_CODES,   8,  4,  255, 3.4028e38f,      int8,     int8,                            \
        "i8 q8",                  "uniform",          "centring")                                                     \
    ROW(INT4,     "int4",     TILED_CODES,   4,  4,   15, KV_MAX_FLOAT32,  int4,     int4,                            \
        "i4 q4",                  "uniform",          "centring per_channel clip_search")                             \
    ROW(GAUSS4,   "int4",     TILED_CODES,   4,  2,   16, 2.9e38f,         gauss4,   gauss4,                          \
        "",                       "gaussian",         "centring clip_search")                                         \
    ROW(INT2,     "int2",     PACKED_CODES,  2,  2,    4, 2.2e38f,         int8,     packed,                          \
        "i2 q2",                  "uniform gaussian", "")                                                             \
    ROW(INT3,     "int3",     PACKED_CODES,  3,  2,    8, 2.7e38f,         int8,     packed,                          \
        "i3 q3",                  "uniform gaussian", "per_channel")                                                           \
    ROW(INT5,     "int5",     PACKED_CODES,  5,  2,   32, 3.0e38f,         int8,     packed,                          \
        "i5 q5",                  "uniform gaussian", "")                                                             \
    ROW(INT6,     "int6",     PACKED_CODES,  6,  2,   64, 3.3e38f,         int8,     packed,                          \
        "i6 q6",                  "uniform gaussian", "")                                                             \
    ROW(INT7,     "int7",     PACKED_CODES,  7,  2,  128, 3.3e38f,         int8,     packed,                          \
        "i7 q7",                  "uniform gaussian", "")

#define KV_NUMBER(number, ...) KV_##number,
enum { KV_DTYPES(KV_NUMBER) KV_NUM_DTYPES };
#undef KV_NUMBER

enum { KV_FLOAT_ROWS, KV_TILED_CODES, KV_PACKED_CODES }; /* families; few_bits.inc.h and expand.inc.h read packed codes */

typedef struct {
    const char *number, *name; /* "GAUSS4", "int4" */
    int family, bits, scale_bytes, levels;
    float limit;
    const char *also, *codebooks, *options; /* words */
} kv_dtype;

#define KV_ROW(number, name, family, bits, scale, levels, limit, prepare, kernels, also, codebooks, options) \
    {#number, name, KV_##family, bits, scale, levels, limit, also, codebooks, options},
static const kv_dtype kv_dtypes[KV_NUM_DTYPES] = {KV_DTYPES(KV_ROW)};
#undef KV_ROW

#endif
