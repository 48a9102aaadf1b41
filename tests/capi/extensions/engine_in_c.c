/* An engine in C: it serves several prompts of a Llama at once, greedily, in a thread that Python knows nothing of.

   The prompts begin with the same tokens, which go through the model once: the sequences are forks. A snapshot of the shared
   tokens is restored at the end, where the first prompt is served once more. */
#include <kvfast.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const kvfast_api *kvfast;

enum { MOST_PROMPTS = 16, GLOBAL_ARRAYS = 4, LAYER_ARRAYS = 6 };

typedef struct {
    const float *attn_norm;   /* (hidden,) */
    const float *qkv;         /* ((q_heads + 2 * kv_heads) * dim, hidden) */
    const float *attn_output; /* (hidden, q_heads * dim) */
    const float *ffn_norm;    /* (hidden,) */
    const float *gate_up;     /* (2 * ffn, hidden) */
    const float *ffn_down;    /* (hidden, ffn) */
} layer_weights;

typedef struct {
    int num_layers, q_heads, kv_heads, dim, hidden, ffn, vocabulary, rotated;
    double eps;
    const float *embedding;    /* (vocabulary, hidden) */
    const float *output_norm;  /* (hidden,) */
    const float *output;       /* (vocabulary, hidden) */
    const double *frequencies; /* (rotated / 2,) radians per position */
    const layer_weights *layers;
} llama;

/* What one call serves, and what became of it. */
typedef struct {
    llama model;
    kvfast_pool *pool;
    int num_prompts, num_shared, most, end;
    int *prompts[MOST_PROMPTS], lengths[MOST_PROMPTS];
    int *outputs[MOST_PROMPTS + 1], counts[MOST_PROMPTS + 1]; /* at last of the first prompt served again */
    int code;
    char text[512];
} service;

/* out (n, outputs) = x (n, inputs) of weight (outputs, inputs) */
static void linear(const float *x, const float *weight, float *out, ptrdiff_t n, ptrdiff_t inputs, ptrdiff_t outputs) {
#pragma omp parallel for
    for (ptrdiff_t o = 0; o < outputs; o++)
        for (ptrdiff_t t = 0; t < n; t++) {
            const float *row = weight + o * inputs, *given = x + t * inputs;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (ptrdiff_t i = 0; i < inputs; i++)
                sum += row[i] * given[i];
            out[t * outputs + o] = sum;
        }
}

static void rms_norm(const float *x, const float *weight, float *out, ptrdiff_t n, ptrdiff_t width, double eps) {
    for (ptrdiff_t t = 0; t < n; t++, x += width, out += width) {
        double squares = 0;
        for (ptrdiff_t i = 0; i < width; i++)
            squares += (double)x[i] * x[i];
        float scale = (float)(1 / sqrt(squares / (double)width + eps));
        for (ptrdiff_t i = 0; i < width; i++)
            out[i] = x[i] * scale * weight[i];
    }
}

/* Rotate the two halves of some heads for a position. */
static void rotate(const llama *m, float *heads, int num_heads, ptrdiff_t position) {
    int half = m->rotated / 2;
    for (int i = 0; i < half; i++) {
        float cosine = (float)cos((double)position * m->frequencies[i]), sine = (float)sin((double)position * m->frequencies[i]);
        for (int head = 0; head < num_heads; head++) {
            float *row = heads + head * m->dim, first = row[i], second = row[half + i];
            row[i] = first * cosine - second * sine;
            row[half + i] = second * cosine + first * sine;
        }
    }
}

static int fail(service *s, int code, const char *text) {
    s->code = code;
    strncpy(s->text, text, sizeof(s->text) - 1);
    return code;
}

/* The next tokens of some sequences, sequence after sequence, through the layers. x: (tokens, hidden) embeddings, to be changed. */
static int run_layers(service *s, const kvfast_batch *batch, const ptrdiff_t *positions, float *x, float *room) {
    const llama *m = &s->model;
    ptrdiff_t n = batch->starts[batch->num_sequences], width = (ptrdiff_t)(m->q_heads + 2 * m->kv_heads) * m->dim;
    float *normed = room, *qkv = normed + n * m->hidden, *heads = qkv + n * width, *gate_up = heads + n * m->q_heads * m->dim;
    float *added = gate_up + 2 * n * m->ffn;
    kvfast_rows q = {.data = qkv, n, m->q_heads, m->dim, .token_stride = width * (ptrdiff_t)sizeof(float)};
    kvfast_rows k = {.data = qkv + m->q_heads * m->dim, n, m->kv_heads, m->dim, .token_stride = q.token_stride}, v = k;
    kvfast_rows out = {.data = heads, n, m->q_heads, m->dim};
    v.data = qkv + (m->q_heads + m->kv_heads) * m->dim;
    for (int layer = 0; layer < m->num_layers; layer++) {
        const layer_weights *w = &m->layers[layer];
        int code;
        rms_norm(x, w->attn_norm, normed, n, m->hidden, m->eps);
        linear(normed, w->qkv, qkv, n, m->hidden, width);
        for (ptrdiff_t t = 0; t < n; t++)
            rotate(m, qkv + t * width, m->q_heads + m->kv_heads, positions[t]);
        if ((code = kvfast->append_batch(s->pool, layer, batch, &k, &v)) ||
            (code = kvfast->attend_batch(s->pool, layer, batch, &q, NULL, &out)))
            return fail(s, code, kvfast->pool_error(s->pool));
        linear(heads, w->attn_output, added, n, (ptrdiff_t)m->q_heads * m->dim, m->hidden);
        for (ptrdiff_t i = 0; i < n * m->hidden; i++)
            x[i] += added[i];
        rms_norm(x, w->ffn_norm, normed, n, m->hidden, m->eps);
        linear(normed, w->gate_up, gate_up, n, m->hidden, 2 * m->ffn);
        for (ptrdiff_t t = 0; t < n; t++)
            for (ptrdiff_t i = 0; i < m->ffn; i++) { /* SwiGLU; what is read lies at or after what is written */
                float gate = gate_up[2 * t * m->ffn + i], up = gate_up[(2 * t + 1) * m->ffn + i];
                gate_up[t * m->ffn + i] = gate / (1 + expf(-gate)) * up;
            }
        linear(gate_up, w->ffn_down, added, n, m->ffn, m->hidden);
        for (ptrdiff_t i = 0; i < n * m->hidden; i++)
            x[i] += added[i];
    }
    return KVFAST_OK;
}

/* The next tokens of some sequences through the model: chosen[i] is the likeliest after those of sequence i. A step that fails
   leaves the sequences as they were. */
static int step(service *s, kvfast_cache **sequences, int count, const ptrdiff_t *starts, const int *tokens, int *chosen) {
    const llama *m = &s->model;
    ptrdiff_t n = starts[count], scratch = n * (2 * m->hidden + 2 * m->ffn + 2 * (m->q_heads + m->kv_heads) * m->dim);
    kvfast_batch batch = {.sequences = sequences, .num_sequences = count, .starts = starts};
    float *x = malloc(sizeof(float) * (size_t)(n * m->hidden + scratch)), *logits = malloc(sizeof(float) * (size_t)m->vocabulary);
    ptrdiff_t *positions = malloc(sizeof(ptrdiff_t) * (size_t)n);
    int code = x && logits && positions ? KVFAST_OK : fail(s, KVFAST_NO_MEMORY, "the engine has no memory");
    if (code == KVFAST_OK) {
        for (int i = 0; i < count; i++)
            for (ptrdiff_t t = starts[i]; t < starts[i + 1]; t++) {
                positions[t] = kvfast->length(sequences[i]) + t - starts[i];
                memcpy(x + t * m->hidden, m->embedding + (ptrdiff_t)tokens[t] * m->hidden, sizeof(float) * (size_t)m->hidden);
            }
        code = run_layers(s, &batch, positions, x, x + n * m->hidden);
    }
    if (code == KVFAST_OK && (code = kvfast->advance_batch(s->pool, &batch, NULL)))
        fail(s, code, kvfast->pool_error(s->pool));
    for (int i = 0; i < count && code; i++)
        kvfast->truncate(sequences[i], kvfast->length(sequences[i]));
    for (int i = 0; i < count && code == KVFAST_OK; i++) {
        float *last = x + (starts[i + 1] - 1) * m->hidden;
        rms_norm(last, m->output_norm, last, 1, m->hidden, m->eps);
        linear(last, m->output, logits, 1, m->hidden, m->vocabulary);
        chosen[i] = 0;
        for (int token = 1; token < m->vocabulary; token++)
            if (logits[token] > logits[chosen[i]])
                chosen[i] = token;
    }
    free(x), free(logits), free(positions);
    return code;
}

/* What follows on the shared tokens: the rest of prompts 0, 1, ..., then the likeliest tokens, into the outputs from `first` on. */
static int generate(service *s, kvfast_cache **sequences, int count, int first) {
    ptrdiff_t starts[MOST_PROMPTS + 1] = {0};
    int chosen[MOST_PROMPTS], place[MOST_PROMPTS], code;
    kvfast_cache *live[MOST_PROMPTS];
    int *tokens, at = 0;
    for (int i = 0; i < count; i++) {
        starts[i + 1] = starts[i] + s->lengths[i] - s->num_shared;
        live[i] = sequences[i], place[i] = i;
    }
    if ((tokens = malloc(sizeof(int) * (size_t)starts[count])) == NULL)
        return fail(s, KVFAST_NO_MEMORY, "the engine has no memory");
    for (int i = 0; i < count; i++)
        for (int t = s->num_shared; t < s->lengths[i]; t++)
            tokens[at++] = s->prompts[i][t];
    while (!(code = step(s, live, count, starts, tokens, chosen))) {
        int left = 0;
        for (int i = 0; i < count; i++) {
            int number = first + place[i];
            if (chosen[i] != s->end)
                s->outputs[number][s->counts[number]++] = chosen[i];
            if (chosen[i] == s->end || s->counts[number] == s->most) {
                if ((code = kvfast->free_sequence(live[i])))
                    return free(tokens), fail(s, code, kvfast->error(live[i]));
                continue; /* its blocks are there for the others */
            }
            live[left] = live[i], place[left] = place[i], tokens[left] = chosen[i], starts[left] = left;
            left++;
        }
        starts[count = left] = left;
        if (count == 0)
            break;
    }
    free(tokens);
    return code;
}

static int open_and_serve(service *s, kvfast_cache **sequences, kvfast_snapshot **shared) {
    ptrdiff_t starts[2] = {0, s->num_shared};
    int code, unused;
    if ((code = kvfast->new_sequence(s->pool, &sequences[0])))
        return fail(s, code, kvfast->pool_error(s->pool));
    if ((code = step(s, sequences, 1, starts, s->prompts[0], &unused)))
        return code;
    if ((code = kvfast->snapshot(sequences[0], shared)))
        return fail(s, code, kvfast->error(sequences[0]));
    for (int i = 1; i < s->num_prompts; i++)
        if ((code = kvfast->fork(sequences[0], &sequences[i])))
            return fail(s, code, kvfast->error(sequences[0]));
    if ((code = generate(s, sequences, s->num_prompts, 0)))
        return code;
    if ((code = kvfast->new_sequence(s->pool, &sequences[s->num_prompts])))
        return fail(s, code, kvfast->pool_error(s->pool));
    if ((code = kvfast->restore(sequences[s->num_prompts], *shared)))
        return fail(s, code, kvfast->error(sequences[s->num_prompts]));
    return generate(s, sequences + s->num_prompts, 1, s->num_prompts);
}

static void *serve_all(void *argument) {
    service *s = argument;
    kvfast_cache *sequences[MOST_PROMPTS + 1] = {NULL};
    kvfast_snapshot *shared = NULL;
    open_and_serve(s, sequences, &shared);
    for (int i = 0; i <= s->num_prompts; i++)
        kvfast->close(sequences[i]);
    kvfast->close_snapshot(shared);
    return NULL;
}

/* The data of some contiguous arrays; the buffers are to be released. */
static int open_arrays(PyObject *arrays, Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++)
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(arrays, i), &buffers[i], PyBUF_C_CONTIGUOUS)) {
            while (i--)
                PyBuffer_Release(&buffers[i]);
            return -1;
        }
    return 0;
}

static int read_prompts(service *s, PyObject *prompts) {
    s->num_prompts = (int)PyTuple_GET_SIZE(prompts);
    for (int i = 0; i <= s->num_prompts; i++)
        if ((s->outputs[i] = calloc((size_t)s->most, sizeof(int))) == NULL)
            return -1;
    for (int i = 0; i < s->num_prompts; i++) {
        PyObject *prompt = PyTuple_GET_ITEM(prompts, i);
        s->lengths[i] = (int)PyTuple_GET_SIZE(prompt);
        if ((s->prompts[i] = calloc((size_t)s->lengths[i], sizeof(int))) == NULL)
            return -1;
        for (int t = 0; t < s->lengths[i]; t++)
            s->prompts[i][t] = (int)PyLong_AsLong(PyTuple_GET_ITEM(prompt, t));
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *outcome(service *s) {
    PyObject *outputs = PyList_New(0);
    for (int i = 0; i <= s->num_prompts && outputs; i++) {
        PyObject *one = PyList_New(0);
        for (int t = 0; t < s->counts[i] && one; t++) {
            PyObject *token = PyLong_FromLong(s->outputs[i][t]);
            PyList_Append(one, token);
            Py_XDECREF(token);
        }
        PyList_Append(outputs, one);
        Py_XDECREF(one);
    }
    return Py_BuildValue("isN", s->code, s->text, outputs);
}

/* serve(sizes, eps, arrays, pool, prompts, num_shared, max_tokens, end) -> code, text, outputs and that of the first prompt again.
   sizes: layers, q_heads, kv_heads, head_dim, hidden, ffn, vocabulary, rotated; arrays: a tuple as in `llama`, then layer by layer;
   prompts: a tuple of tuples of more than num_shared tokens, the first of which are the same. */
static PyObject *serve(PyObject *self, PyObject *args) {
    PyObject *arrays, *pool, *prompts, *result = NULL;
    service *s = calloc(1, sizeof(service));
    llama *m;
    Py_buffer *buffers = NULL;
    layer_weights *layers = NULL;
    pthread_t thread;
    int count, opened = 0;
    (void)self;
    if (s == NULL)
        return PyErr_NoMemory();
    m = &s->model;
    if (!PyArg_ParseTuple(args, "(iiiiiiii)dO!OO!iii", &m->num_layers, &m->q_heads, &m->kv_heads, &m->dim, &m->hidden, &m->ffn,
                          &m->vocabulary, &m->rotated, &m->eps, &PyTuple_Type, &arrays, &pool, &PyTuple_Type, &prompts,
                          &s->num_shared, &s->most, &s->end))
        goto done;
    count = GLOBAL_ARRAYS + m->num_layers * LAYER_ARRAYS;
    if (PyTuple_GET_SIZE(arrays) != count || PyTuple_GET_SIZE(prompts) > MOST_PROMPTS) {
        PyErr_SetString(PyExc_ValueError, "a wrong number of arrays or prompts");
        goto done;
    }
    buffers = calloc((size_t)count, sizeof(Py_buffer)), layers = calloc((size_t)m->num_layers, sizeof(layer_weights));
    if (read_prompts(s, prompts) || open_arrays(arrays, buffers, count))
        goto done;
    opened = count;
    m->embedding = buffers[0].buf, m->output_norm = buffers[1].buf, m->output = buffers[2].buf, m->frequencies = buffers[3].buf;
    for (int i = 0; i < m->num_layers; i++) {
        const Py_buffer *of = buffers + GLOBAL_ARRAYS + i * LAYER_ARRAYS;
        layers[i] = (layer_weights){of[0].buf, of[1].buf, of[2].buf, of[3].buf, of[4].buf, of[5].buf};
    }
    m->layers = layers;
    if ((s->pool = kvfast->open_batches(pool)) == NULL)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    if (pthread_create(&thread, NULL, serve_all, s))
        s->code = 1;
    else
        pthread_join(thread, NULL);
    Py_END_ALLOW_THREADS
    kvfast->close_batches(s->pool);
    result = outcome(s);
done:
    while (opened--)
        PyBuffer_Release(&buffers[opened]);
    for (int i = 0; i <= MOST_PROMPTS; i++)
        free(s->outputs[i]), free(i < MOST_PROMPTS ? s->prompts[i] : NULL);
    free(buffers), free(layers), free(s);
    return result;
}

static PyMethodDef methods[] = {{"serve", serve, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "engine_in_c", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_engine_in_c(void) {
    PyObject *self;
    if ((kvfast = kvfast_import()) == NULL || (self = PyModule_Create(&module)) == NULL)
        return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
    return self;
}
