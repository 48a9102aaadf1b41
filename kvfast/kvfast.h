/* kvfast from C: the caches of a Python process, called without Python in between.

       static const kvfast_api *kvfast;                     // kvfast = kvfast_import(): once, with the GIL
       kvfast_cache *cache = kvfast->open(python_cache);    // of a KVCache, RingKVCache, MLAKVCache or Sequence

       kvfast_rows k = {.data = keys, .num_tokens = 1, .num_heads = 8, .dim = 128}, v = k, q = k, out = k;
       ...
       if (kvfast->append(cache, layer, &k, &v) || kvfast->attend(cache, layer, &q, NULL, &out))
           fprintf(stderr, "%s\n", kvfast->error(cache));

   Compile with the folder of `kvfast.get_include()` on the include path; nothing is to be linked.

   All functions but open can be called with the GIL or without it, from any thread; a Python that has none means by it an
   attached thread state. What a step of decoding needs takes it only where memory is to be had or given back, or a block is
   full: about once in 16 tokens; so do append to a sequence of a PagedKVCache, and calls that fail. Long calls do not keep
   it, but a caller that has it keeps it.
   Threads that only read a cache (attend) go together; one that changes it must be alone. Another gets KVFAST_BUSY. Those
   that call it from Python count, too.

   Results are the same bits as from Python. A call that fails leaves the cache as it was. */
#ifndef KVFAST_H
#define KVFAST_H

#include <Python.h>
#include <stddef.h>

#define KVFAST_ABI 1 /* of the structs; the functions of a table with the same number stay where they are */
#define KVFAST_API 2 /* of the functions; a table with a higher number has more of them, behind the others */

enum {
    KVFAST_OK = 0,
    KVFAST_INVALID = -1,    /* an argument, NULL where something must be, a closed sequence */
    KVFAST_SHAPE = -2,      /* of rows, or num_q_heads */
    KVFAST_NOT_FINITE = -3, /* NaN, infinity, or beyond the range of what is stored */
    KVFAST_FULL = -4,       /* max_seq_len, or the blocks of a pool */
    KVFAST_BUSY = -5,       /* another thread is in the cache */
    KVFAST_NO_MEMORY = -6,
    KVFAST_NO_LAYER = -7,
    KVFAST_ERROR = -8       /* anything else */
};

enum { KVFAST_FLOAT32, KVFAST_FLOAT16, KVFAST_BFLOAT16 };

/* A cache that is open; it keeps the Python object alive. */
typedef struct kvfast_cache kvfast_cache;

/* An array (num_tokens, num_heads, dim) whose rows of dim elements are contiguous and aligned to their elements. */
typedef struct {
    void *data;
    ptrdiff_t num_tokens;
    ptrdiff_t num_heads;
    ptrdiff_t dim;
    ptrdiff_t token_stride; /* bytes; 0: head after head, token after token */
    ptrdiff_t head_stride;
    int dtype;
} kvfast_rows;

/* As the keyword arguments of `KVCache.attend`. All 0, or NULL for the struct: the defaults. */
typedef struct {
    float scale;               /* 0: dim ** -0.5 */
    float softcap;             /* 0: off */
    ptrdiff_t sliding_window;  /* 0: none, or that of a ring */
    ptrdiff_t num_sink_tokens; /* 0: none, or those of a ring; -1: none */
    const float *sinks;        /* (num_q_heads,) or NULL */
    const float *alibi_slopes; /* (num_q_heads,) or NULL */
    float *lse;                /* where to write the log-sum-exp, (num_tokens, num_q_heads), or NULL */
    int not_causal;
    int num_splits;
    int num_threads;           /* 0: as kvfast.set_num_threads says */
} kvfast_options;

/* What the blocks of a PagedKVCache are like. */
typedef struct {
    int num_layers, num_kv_heads, head_dim;
    int v_head_dim;        /* 0: head_dim */
    int block_size;        /* 0: 32 tokens */
    ptrdiff_t num_blocks;
    const char *dtype;     /* "int8", "k8v4", "bfloat16", ...: a format without float rows */
} kvfast_shape;

#define KVFAST_ALIGNMENT 64 /* of the address of each block, in bytes */

typedef struct {
    int abi, api;

    /* NULL with a Python exception; needs the GIL. A cache that turns its keys itself (rope="cache") is refused. */
    kvfast_cache *(*open)(PyObject *cache);
    void (*close)(kvfast_cache *cache); /* NULL: nothing */

    /* k: (n, num_kv_heads, head_dim), v: (n, num_kv_heads, v_head_dim). Of an MLAKVCache k is (n, 1, latent_dim + rope_dim), v NULL. */
    int (*append)(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v);
    /* q: (n, num_q_heads, head_dim), out: (n, num_q_heads, v_head_dim), of the last n tokens. Of an MLAKVCache q has latent_dim + rope_dim elements,
       out latent_dim. */
    int (*attend)(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out);
    int (*advance)(kvfast_cache *cache, ptrdiff_t n);
    int (*truncate)(kvfast_cache *cache, ptrdiff_t n); /* takes the GIL */

    ptrdiff_t (*length)(kvfast_cache *cache); /* complete tokens, or an error */
    ptrdiff_t (*layer_length)(kvfast_cache *cache, int layer);
    /* What the last call that failed said; "" if none has. */
    const char *(*error)(kvfast_cache *cache);

    /* The kernels in use, a kv_kernels of "simd/kernels.h". That header may be another with each version of kvfast:
       compile against the one that runs. */
    const void *(*kernels)(void);

    /* From API 2 on; both need the GIL.
       Bytes of one block of one layer, as `kvfast.buffer_layout` has them; -1 with a Python exception. */
    ptrdiff_t (*block_nbytes)(const kvfast_shape *shape);
    /* A new PagedKVCache whose blocks lie in memory of the caller: those of layer i from layers[i] on, block_stride bytes apart (0:
       block after block). It keeps a reference to owner, unless that is NULL; the memory must be there as long as the pool and
       its sequences. NULL with a Python exception. */
    PyObject *(*open_pool)(const kvfast_shape *shape, void *const *layers, ptrdiff_t block_stride, PyObject *owner);
} kvfast_api;

/* The functions of the kvfast that Python imports, or NULL with a Python exception. Needs the GIL. */
static inline const kvfast_api *kvfast_import(void) {
    const kvfast_api *api;
    PyObject *module = PyImport_ImportModule("kvfast.capi");
    if (module == NULL)
        return NULL;
    Py_DECREF(module);
    api = (const kvfast_api *)PyCapsule_Import("kvfast.capi.C_API", 0);
    if (api != NULL && (api->abi != KVFAST_ABI || api->api < KVFAST_API)) {
        PyErr_Format(PyExc_ImportError, "compiled for kvfast with ABI %d and API %d or later, got ABI %d and API %d", KVFAST_ABI,
                     KVFAST_API, api->abi, api->api);
        return NULL;
    }
    return api;
}

#endif
