/* kvfast from C: calls the caches of a Python process without going through Python.

       static const kvfast_api *kvfast;                     // kvfast = kvfast_import(): once, with the GIL
       kvfast_cache *cache = kvfast->open(python_cache);    // of a KVCache, RingKVCache, MLAKVCache or Sequence

       kvfast_rows k = {.data = keys, .num_tokens = 1, .num_heads = 8, .dim = 128}, v = k, q = k, out = k;
       ...
       if (kvfast->append(cache, layer, &k, &v) || kvfast->attend(cache, layer, &q, NULL, &out))
           fprintf(stderr, "%s\n", kvfast->error(cache));

   Many sequences share a pool, whose batches append to and attend to all of them at once:

       kvfast_pool *pool = kvfast->open_batches(python_pool);    // of a PagedKVCache or PagedMLAKVCache; see open_pool
       kvfast_cache *sequences[2];
       if (kvfast->new_sequence(pool, &sequences[0]) || kvfast->new_sequence(pool, &sequences[1])) ...
       kvfast_batch batch = {.sequences = sequences, .num_sequences = 2, .starts = (ptrdiff_t[]){0, 5, 6}};
       if (kvfast->append_batch(pool, layer, &batch, &k, &v) || kvfast->attend_batch(pool, layer, &batch, &q, NULL, &out))
           fprintf(stderr, "%s\n", kvfast->pool_error(pool));

   Compile with the folder of `kvfast.get_include()` on the include path. There is nothing to link.

   Threads and the GIL. The functions that say so need the GIL. All others can be called from any thread, also from one that Python
   knows nothing of, with the GIL or without it. On a free-threaded Python, read "attached thread state" for "GIL".
   These functions take the GIL only in the cases that are listed, and to tell an error:
   - length, layer_length, error, pool_error, kernels: in no other case.
   - append, append_batch, and advance of caches other than sequences:
     to take or release blocks, about once in 16 tokens;
     for more than 64 tokens (in a batch of sequences 512);
     for the first slots of a pool.
   - attend, attend_batch:
     for spliced caches;
     for prefixes that a batch reads once;
     for tables of pools with windows or float rows;
     in a long call of a thread that holds the GIL, to look for Ctrl-C (KVFAST_ERROR, "KeyboardInterrupt").
   All other functions take it. Long calls do not hold the GIL, but if the caller holds it, it stays held.
   Several threads may read a cache (attend) at once; a thread that changes it must be alone. Otherwise a call returns
   KVFAST_BUSY. Threads that use the cache from Python count, too. A pool and all of its sequences count as one cache, as do a
   cache and its forks. A handle holds the text of its last error: threads that read one cache at once open one each.

   Whoever gets a kvfast_cache, kvfast_pool or kvfast_snapshot owns it, and closes it once, after the last call with it. A sequence
   keeps its pool, so their order does not matter. The arrays of a call are read or written only until it returns.

   Results are the same bits as from Python. A call that fails leaves the cache or the pool as it was, and what it would have made
   is NULL. */
#ifndef KVFAST_H
#define KVFAST_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define KVFAST_ABI 3 /* version of the structs; tables with the same number have their functions in the same places */
#define KVFAST_API 3 /* version of the functions; a table with a higher number has more of them, after the others */

enum {
    KVFAST_OK = 0,
    KVFAST_INVALID = -1,    /* an invalid argument, NULL where it is not allowed, or a closed sequence */
    KVFAST_SHAPE = -2,      /* a wrong shape of rows, or a wrong number of query heads */
    KVFAST_NOT_FINITE = -3, /* NaN, infinity, or a value beyond the range of the storage */
    KVFAST_FULL = -4,       /* max_seq_len is reached, or the pool has no block left */
    KVFAST_BUSY = -5,       /* another thread is in the cache */
    KVFAST_NO_MEMORY = -6,
    KVFAST_NO_LAYER = -7,
    KVFAST_ERROR = -8       /* anything else */
};

enum { KVFAST_FLOAT32, KVFAST_FLOAT16, KVFAST_BFLOAT16 };
/* Precisions; the last is exact, and gives a query the same bits for any number of queries in a call. */
enum { KVFAST_EXACT = 1, KVFAST_FAST = 2, KVFAST_INVARIANT = 3 };

/* An open cache, or a sequence of a pool. It keeps the Python object alive. */
typedef struct kvfast_cache kvfast_cache;
/* A pool of blocks. It keeps the Python object alive. */
typedef struct kvfast_pool kvfast_pool;
/* The tokens of a cache at one point in time, which never change. */
typedef struct kvfast_snapshot kvfast_snapshot;

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

/* The keyword arguments of `KVCache.attend`. All 0, or NULL instead of the struct, means the defaults. */
typedef struct {
    float scale;               /* 0: dim ** -0.5 */
    float softcap;             /* 0: off */
    ptrdiff_t sliding_window;  /* 0: none, or the window of a ring */
    ptrdiff_t num_sink_tokens; /* 0: none, or the number of a ring; -1: none */
    const float *sinks;        /* (num_q_heads,) or NULL */
    const float *alibi_slopes; /* (num_q_heads,) or NULL */
    float *lse;                /* where to write the log-sum-exp, (num_tokens, num_q_heads), or NULL */
    int not_causal;
    int num_splits;
    int num_threads;           /* 0: the number set by kvfast.set_num_threads */
    ptrdiff_t attention_chunk_size; /* 0: none */
    const ptrdiff_t *spans;    /* (num_spans, 2), a start and a stop of each, or NULL */
    ptrdiff_t num_spans;
    int clamp_spans;
    const ptrdiff_t *tree_parents; /* (num_parents,) of the drafts, which are the last tokens, or NULL */
    ptrdiff_t num_parents;
    const int64_t *indices;    /* (num_tokens, index_heads, num_indices) positions that each query sees, -1 for none, or NULL */
    ptrdiff_t num_indices;
    int index_heads;           /* 0: 1, the same for all KV heads */
    int index_block;           /* 0: 1, single positions; 16: the first ones of runs of 16 */
    int precision;             /* 0: that of the cache, which Python sets, else of the process; or KVFAST_EXACT and so on */
} kvfast_options;

/* Some sequences of a pool. All but the first two 0: one token of each.
   Or, with sequences NULL, what a scheduler of the caller's says: it gives out the blocks of the pool itself, which has no sequences then. */
typedef struct {
    kvfast_cache *const *sequences;
    ptrdiff_t num_sequences;
    const ptrdiff_t *starts;        /* (num_sequences + 1,): sequence i has rows starts[i] to starts[i + 1]; NULL: 0, 1, 2, ... */
    const ptrdiff_t *span_counts;   /* (num_sequences,): how many of the options' spans each has, in this order; NULL: no spans */
    const ptrdiff_t *parent_counts; /* (num_sequences,): likewise of the options' tree_parents, which count from 0 in each sequence */
    int no_cascade; /* read blocks that sequences share for each of them, for the bits of attend of each alone */
    const int32_t *block_table;     /* (num_sequences, max_blocks), to attend: blocks of each sequence */
    ptrdiff_t max_blocks;
    const int32_t *seq_lens;        /* (num_sequences,), to attend: tokens in the blocks, those of q included */
    const int64_t *slots;           /* (num_tokens,), to append: where each token goes, block * block_size + its place there; -1: nowhere */
} kvfast_batch;

/* What the blocks of a PagedKVCache are like. */
typedef struct {
    int num_layers, num_kv_heads, head_dim;
    int v_head_dim;        /* 0: head_dim */
    int block_size;        /* 0: 64 tokens, or what the format needs */
    ptrdiff_t num_blocks;
    const char *dtype;     /* "int4", "int8", "k8v4", "bfloat16", ... */
} kvfast_shape;

#define KVFAST_ALIGNMENT 64 /* of the address of each block, in bytes */

typedef struct {
    int abi, api;

    /* NULL with a Python exception on error. Needs the GIL. Refuses a ring that rotates its keys itself (`rope=`). */
    kvfast_cache *(*open)(PyObject *cache);
    void (*close)(kvfast_cache *cache); /* NULL: nothing */

    /* k: (n, num_kv_heads, head_dim), v: (n, num_kv_heads, v_head_dim). For an MLAKVCache k is (n, 1, latent_dim + rope_dim)
       and v is NULL. */
    int (*append)(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v);
    /* q: (n, num_q_heads, head_dim), out: (n, num_q_heads, v_head_dim), for the last n tokens. For an MLAKVCache the rows of q
       have latent_dim + rope_dim elements, and those of out latent_dim. */
    int (*attend)(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out);
    int (*advance)(kvfast_cache *cache, ptrdiff_t n);
    int (*truncate)(kvfast_cache *cache, ptrdiff_t n); /* takes the GIL */

    ptrdiff_t (*length)(kvfast_cache *cache); /* number of complete tokens, or a code below 0 */
    ptrdiff_t (*layer_length)(kvfast_cache *cache, int layer); /* tokens of a layer, or a code below 0 */
    /* Error text of the last call for this cache that failed; "" if none has. For NULL: that the cache is NULL. */
    const char *(*error)(kvfast_cache *cache);

    /* The kernels in use, a kv_kernels of "simd/kernels.h". That header may change with each version of kvfast: compile
       against the version that runs. */
    const void *(*kernels)(void);

    /* Bytes of one block of one layer, as those of `buffer_layout`; -1 with a Python exception. Needs the GIL. */
    ptrdiff_t (*block_nbytes)(const kvfast_shape *shape);
    /* A new PagedKVCache whose blocks lie in memory of the caller: those of layer i from layers[i] on, block_stride bytes apart (0:
       block after block). With layers NULL they lie in memory of the pool's own. The pool keeps a reference to owner, unless that is
       NULL. The memory must be there as long as the pool and its sequences. NULL with a Python exception. Needs the GIL. */
    PyObject *(*open_pool)(const kvfast_shape *shape, void *const *layers, ptrdiff_t block_stride, PyObject *owner);

    /* truncate to n tokens, then append the num_kept dropped tokens that `keep` names: the accepted branch of a tree of
       drafts. keep[i] counts from position n. Call it before advance. keep may be NULL if num_kept is 0. */
    int (*keep_branch)(kvfast_cache *cache, ptrdiff_t n, const ptrdiff_t *keep, ptrdiff_t num_kept);
    /* Another cache with the same tokens, in the same blocks until one of the two writes to them. */
    int (*fork)(kvfast_cache *cache, kvfast_cache **other);
    /* For a snapshot all tokens must be complete. restore goes back to it, in this or another cache of the same shape and formats, also
       of another pool; it drops tokens that are not complete, and leaves the snapshot as it is. */
    int (*snapshot)(kvfast_cache *cache, kvfast_snapshot **snapshot);
    int (*restore)(kvfast_cache *cache, kvfast_snapshot *snapshot);
    void (*close_snapshot)(kvfast_snapshot *snapshot); /* NULL: nothing */
    /* To and from a file, as `save` and `restore(kvfast.Snapshot.load(path))`. They need the packages of the extra `files`. */
    int (*save)(kvfast_cache *cache, const char *path);
    int (*load)(kvfast_cache *cache, const char *path);

    /* NULL with a Python exception on error. Needs the GIL. */
    kvfast_pool *(*open_batches)(PyObject *pool);
    void (*close_batches)(kvfast_pool *pool); /* NULL: nothing */
    /* An empty sequence. All functions of caches take it. */
    int (*new_sequence)(kvfast_pool *pool, kvfast_cache **sequence);
    /* Gives the blocks of a sequence back at once; afterwards its handle can only be closed, and other calls with it return KVFAST_INVALID.
       close alone gives them back, too, unless Python or another handle has the sequence. */
    int (*free_sequence)(kvfast_cache *sequence);
    ptrdiff_t (*num_free_blocks)(kvfast_pool *pool); /* or a code below 0 */
    /* As append of each sequence, for all of them or for none. A sequence comes once in a batch. With slots, num_sequences and starts do
       not matter. */
    int (*append_batch)(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v);
    /* As attend of each sequence. Blocks that several sequences share are read once where that is faster, see kvfast_batch. */
    int (*attend_batch)(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                        const kvfast_rows *out);
    /* Text of the last error of a function that was given this pool; as error. */
    const char *(*pool_error)(kvfast_pool *pool);
    /* As advance, for n tokens whose ids are known: match_prefix then finds the blocks that they fill. Only sequences of a
       pool take it. */
    int (*advance_ids)(kvfast_cache *sequence, const int64_t *token_ids, ptrdiff_t n);
    /* A sequence that begins with the blocks that the pool still has of a prompt of n tokens: its length tells how many tokens were
       found, perhaps 0, and never the last one. Blocks are found only with the salt that they were made with (salt_nbytes of it, at most
       64; NULL and 0: none), which the sequence keeps. */
    int (*match_prefix)(kvfast_pool *pool, const int64_t *token_ids, ptrdiff_t n, const void *salt, ptrdiff_t salt_nbytes,
                        kvfast_cache **sequence);
    /* Once per step, after append_batch to all layers: as advance of each sequence by its rows, for all of them or for none. token_ids:
       (num_tokens,), as of advance_ids, or NULL. Takes the GIL once. */
    int (*advance_batch)(kvfast_pool *pool, const kvfast_batch *batch, const int64_t *token_ids);
} kvfast_api;

/* The functions of the kvfast that Python imports; NULL with a Python exception on error. Needs the GIL. */
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
