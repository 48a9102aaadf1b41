/* A runtime in C: it decodes token by token with a cache of kvfast, in a thread that Python knows nothing of. */
#include <kvfast.h>
#include <pthread.h>
#include <simd/kernels.h>
#include <time.h>

static const kvfast_api *kvfast;

/* k: (layers, tokens, kv_heads, dim), v: (layers, tokens, kv_heads, out_dim), q: (layers, tokens, q_heads, dim),
   out: (layers, tokens, q_heads, out_dim), float32. */
typedef struct {
    kvfast_cache *cache;
    const kvfast_options *options;
    float *k, *v, *q, *out;
    ptrdiff_t layers, tokens, kv_heads, q_heads, dim, out_dim, chunk;
    int code;
} decoding;

static void *decode(void *argument) {
    decoding *d = argument;
    for (ptrdiff_t t = 0; t < d->tokens; t += d->chunk) {
        ptrdiff_t n = d->tokens - t < d->chunk ? d->tokens - t : d->chunk;
        for (int layer = 0; layer < d->layers; layer++) {
            ptrdiff_t at = layer * d->tokens + t;
            kvfast_rows k = {d->k + at * d->kv_heads * d->dim, n, d->kv_heads, d->dim};
            kvfast_rows v = {d->v ? d->v + at * d->kv_heads * d->out_dim : NULL, n, d->kv_heads, d->out_dim};
            kvfast_rows q = {d->q + at * d->q_heads * d->dim, n, d->q_heads, d->dim};
            kvfast_rows out = {d->out + at * d->q_heads * d->out_dim, n, d->q_heads, d->out_dim};
            if ((d->code = kvfast->append(d->cache, layer, &k, d->v ? &v : NULL)))
                return NULL;
            if ((d->code = kvfast->attend(d->cache, layer, &q, d->options, &out)))
                return NULL;
        }
        if ((d->code = kvfast->advance(d->cache, n)))
            return NULL;
    }
    return NULL;
}

static int floats(PyObject *object, Py_buffer *buffer) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE))
        return -1;
    if (buffer->ndim == 4 && buffer->itemsize == sizeof(float))
        return 0;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_TypeError, "float32 of 4 dimensions");
    return -1;
}

/* run(cache, k, v or None, q, out, chunk) -> code, text, length */
static PyObject *run(PyObject *self, PyObject *args) {
    PyObject *python_cache, *k, *v, *q, *out, *result = NULL;
    Py_buffer buffers[4];
    PyObject *objects[4];
    decoding d = {0};
    int opened = 0, n;
    pthread_t thread;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOn", &python_cache, &k, &v, &q, &out, &d.chunk))
        return NULL;
    objects[0] = k, objects[1] = q, objects[2] = out, objects[3] = v;
    for (n = v == Py_None ? 3 : 4; opened < n; opened++)
        if (floats(objects[opened], &buffers[opened]))
            goto done;
    d.k = buffers[0].buf, d.q = buffers[1].buf, d.out = buffers[2].buf, d.v = n == 4 ? buffers[3].buf : NULL;
    d.layers = buffers[0].shape[0], d.tokens = buffers[0].shape[1], d.kv_heads = buffers[0].shape[2], d.dim = buffers[0].shape[3];
    d.q_heads = buffers[1].shape[2], d.out_dim = buffers[2].shape[3];
    if ((d.cache = kvfast->open(python_cache)) == NULL)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    if (pthread_create(&thread, NULL, decode, &d))
        d.code = 1;
    else
        pthread_join(thread, NULL);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("isn", d.code, kvfast->error(d.cache), kvfast->length(d.cache));
    kvfast->close(d.cache);
done:
    while (opened--)
        PyBuffer_Release(&buffers[opened]);
    return result;
}

/* nanoseconds(cache, q_heads, dim, calls) of attend with one token, and the name of the kernels' tier */
static PyObject *nanoseconds(PyObject *self, PyObject *args) {
    static float q[64 * 512], out[64 * 512];
    kvfast_rows queries = {q, 1}, target = {out, 1};
    struct timespec begin, end;
    PyObject *python_cache;
    kvfast_cache *cache;
    long calls;
    int code = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Onnl", &python_cache, &queries.num_heads, &queries.dim, &calls))
        return NULL;
    target.num_heads = queries.num_heads, target.dim = queries.dim;
    if (queries.num_heads > 64 || queries.dim > 512 || (cache = kvfast->open(python_cache)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 0; i < calls; i++)
        code |= kvfast->attend(cache, 0, &queries, NULL, &target);
    clock_gettime(CLOCK_MONOTONIC, &end);
    Py_END_ALLOW_THREADS
    kvfast->close(cache);
    return Py_BuildValue("ids", code, ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / calls,
                         ((const kv_kernels *)kvfast->kernels())->isa);
}

/* pool_over(memory or None, layers, kv_heads, dim, blocks, block_size, dtype, stride) -> bytes of a block, pool: the layers one after
   the other in a writable buffer, or all NULL */
static PyObject *pool_over(PyObject *self, PyObject *args) {
    kvfast_shape shape = {0};
    ptrdiff_t stride, nbytes;
    void *layers[4] = {NULL};
    PyObject *memory, *pool;
    Py_buffer buffer;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oiiiniyn", &memory, &shape.num_layers, &shape.num_kv_heads, &shape.head_dim, &shape.num_blocks,
                          &shape.block_size, &shape.dtype, &stride))
        return NULL;
    if ((nbytes = kvfast->block_nbytes(&shape)) < 0)
        return NULL;
    if (memory != Py_None) {
        if (PyObject_GetBuffer(memory, &buffer, PyBUF_WRITABLE))
            return NULL;
        for (int i = 0; i < shape.num_layers && i < 4; i++)
            layers[i] = (char *)buffer.buf + i * (buffer.len / shape.num_layers);
        PyBuffer_Release(&buffer); /* the pool has its owner */
    }
    if ((pool = kvfast->open_pool(&shape, layers, stride, memory)) == NULL)
        return NULL;
    return Py_BuildValue("nN", nbytes, pool);
}

/* A step of all layers for a batch of one token each. */
typedef struct {
    kvfast_pool *pool;
    kvfast_cache *sequences[16];
    kvfast_batch batch;
    int32_t blocks[16], lengths[16];
    int64_t slots[16];
    kvfast_rows k, v, q, out;
    int layers, code;
    char done;
} batch_step;

static void *run_batch_step(void *argument) {
    batch_step *s = argument;
    for (int layer = 0; layer < s->layers && s->code == KVFAST_OK; layer++)
        if ((s->code = kvfast->append_batch(s->pool, layer, &s->batch, &s->k, &s->v)) == KVFAST_OK)
            s->code = kvfast->attend_batch(s->pool, layer, &s->batch, &s->q, NULL, &s->out);
    __atomic_store_n(&s->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* held_meanwhile(pool, sequences, layers, k, v, q, out, seconds) -> code, whether a thread that Python does not know came to its end
   while this one held the GIL. Without sequences: the first tokens of the first blocks, of 16 tokens each, by tables and slots. */
static PyObject *held_meanwhile(PyObject *self, PyObject *args) {
    PyObject *pool, *sequences, *objects[4], *result = NULL;
    Py_buffer buffers[4];
    kvfast_rows *rows[4];
    struct timespec pause = {0, 1000000};
    double seconds;
    batch_step s = {0};
    int opened = 0, count, alone;
    pthread_t thread;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!iOOOOd", &pool, &PyTuple_Type, &sequences, &s.layers, &objects[0], &objects[1], &objects[2],
                          &objects[3], &seconds))
        return NULL;
    rows[0] = &s.k, rows[1] = &s.v, rows[2] = &s.q, rows[3] = &s.out;
    if ((count = (int)PyTuple_GET_SIZE(sequences)) > 16 || (s.pool = kvfast->open_batches(pool)) == NULL)
        return NULL;
    for (int i = 0; i < count; i++)
        if ((s.sequences[i] = kvfast->open(PyTuple_GET_ITEM(sequences, i))) == NULL)
            goto done;
    for (; opened < 4; opened++) {
        if (PyObject_GetBuffer(objects[opened], &buffers[opened], PyBUF_C_CONTIGUOUS))
            goto done;
        *rows[opened] = (kvfast_rows){buffers[opened].buf, buffers[opened].shape[0], buffers[opened].shape[1], buffers[opened].shape[2]};
    }
    s.batch = (kvfast_batch){.sequences = s.sequences, .num_sequences = count};
    if (count == 0) {
        s.batch = (kvfast_batch){.num_sequences = s.k.num_tokens, .block_table = s.blocks, .max_blocks = 1, .seq_lens = s.lengths,
                                 .slots = s.slots};
        for (int i = 0; i < s.k.num_tokens && i < 16; i++)
            s.blocks[i] = i, s.lengths[i] = 1, s.slots[i] = 16 * i;
    }
    if (pthread_create(&thread, NULL, run_batch_step, &s))
        goto done;
    for (int i = 0; i < seconds * 1000 && !__atomic_load_n(&s.done, __ATOMIC_ACQUIRE); i++)
        nanosleep(&pause, NULL);
    alone = __atomic_load_n(&s.done, __ATOMIC_ACQUIRE);
    Py_BEGIN_ALLOW_THREADS
    pthread_join(thread, NULL);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("ii", s.code, alone);
done:
    while (opened--)
        PyBuffer_Release(&buffers[opened]);
    for (int i = 0; i < count; i++)
        kvfast->close(s.sequences[i]);
    kvfast->close_batches(s.pool);
    return result;
}

static PyMethodDef methods[] = {
    {"held_meanwhile", held_meanwhile, METH_VARARGS, NULL},
    {"run", run, METH_VARARGS, NULL},
    {"nanoseconds", nanoseconds, METH_VARARGS, NULL},
    {"pool_over", pool_over, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "runtime_in_c", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_runtime_in_c(void) {
    PyObject *self;
    if ((kvfast = kvfast_import()) == NULL || (self = PyModule_Create(&module)) == NULL)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
    return self;
}
