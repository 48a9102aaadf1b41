/* A device of ggml that computes attention in host memory, GGML_OP_FLASH_ATTN_EXT. It has the type ACCEL, so llama.cpp puts it before
   the CPU and keeps its caches where they are. Where another device has the weights, it also stores the rows of a few tokens in a cache
   in host memory, GGML_OP_SET_ROWS: ggml gives attention to the device of the operation before it, and else to the other device, for which
   it would copy the cache for each token. */
#include "attention.h"
#include "ggml_rows.h"

#define GGML_BACKEND_DL
#define GGML_BACKEND_BUILD
#define GGML_BACKEND_SHARED
#include "ggml-backend-impl.h"

#include <stdlib.h>
#include <string.h>

#if GGML_BACKEND_API_VERSION != 2
#error "kvfast knows version 2 of GGML_BACKEND_API_VERSION; this is another one"
#endif

enum { FEW_ROWS = 31 }; /* of more, copying the cache costs less than attention in host memory */

typedef struct {
    int num_threads;
    kv_workspace workspace;
} context;

static const char *get_name(ggml_backend_t backend)
{
    (void)backend;
    return "KVFAST";
}

static void free_backend(ggml_backend_t backend)
{
    context *own = backend->context;
    kv_release(&own->workspace);
    free(own);
    free(backend);
}

static bool in_host_memory(const struct ggml_tensor *tensor)
{
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return buffer && ggml_backend_buffer_is_host(buffer);
}

/* Whether an operation stores a few rows in host memory that come from weights elsewhere. */
static bool stores_rows(const struct ggml_tensor *op)
{
    const struct ggml_tensor *rows = op->src[0], *ids = op->src[1];
    if (!in_host_memory(op) || !kv_takes_type(op->type) || rows->type != GGML_TYPE_F32 || rows->nb[0] != sizeof(float)) return false;
    if (ids->type != GGML_TYPE_I64 || rows->ne[1] > FEW_ROWS) return false;
    for (const struct ggml_tensor *next; rows && rows->op != GGML_OP_NONE; rows = next) {
        next = rows->src[0];
        if (rows->op != GGML_OP_MUL_MAT || next->op != GGML_OP_NONE) continue;
        if (next->buffer) return !ggml_backend_buffer_is_host(next->buffer);
        next = rows->src[1]; /* the other one is a rotation */
    }
    return false;
}

static void store_rows(const struct ggml_tensor *op)
{
    const struct ggml_tensor *rows = op->src[0], *ids = op->src[1];
    for (int64_t i3 = 0; i3 < rows->ne[3]; i3++)
        for (int64_t i2 = 0; i2 < rows->ne[2]; i2++)
            for (int64_t i = 0; i < rows->ne[1]; i++) {
                const char *id = (const char *)ids->data + i * ids->nb[0] + i2 % ids->ne[1] * ids->nb[1] + i3 % ids->ne[2] * ids->nb[2];
                const char *row = (const char *)rows->data + i * rows->nb[1] + i2 * rows->nb[2] + i3 * rows->nb[3];
                char *to = (char *)op->data + *(const int64_t *)id * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3];
                ggml_quantize_chunk(op->type, (const float *)row, to, 0, 1, rows->ne[0], NULL);
            }
}

static enum ggml_status graph_compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    context *own = backend->context;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;
        if (node->op == GGML_OP_SET_ROWS) store_rows(node);
        else if (node->op == GGML_OP_FLASH_ATTN_EXT && !kv_flash_attention(node, own->num_threads, &own->workspace)) return GGML_STATUS_ALLOC_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

static const struct ggml_backend_i backend_interface = {
    .get_name = get_name,
    .free = free_backend,
    .graph_compute = graph_compute,
};

static const char *device_name(ggml_backend_dev_t device)
{
    (void)device;
    return "KVFAST";
}

static const char *device_description(ggml_backend_dev_t device)
{
    (void)device;
    return kv_active_tier().attention->isa;
}

static void device_memory(ggml_backend_dev_t device, size_t *available, size_t *total)
{
    (void)device;
    *available = *total = 0;
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device)
{
    (void)device;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void device_properties(ggml_backend_dev_t device, struct ggml_backend_dev_props *properties)
{
    memset(properties, 0, sizeof *properties);
    properties->name = device_name(device);
    properties->description = device_description(device);
    properties->type = device_type(device);
    properties->caps.buffer_from_host_ptr = true;
#ifdef KVFAST_GGML_HAS_MMAP_SUPPORT
    properties->caps.mmap_support = true;
#endif
}

static ggml_backend_t device_init(ggml_backend_dev_t device, const char *parameters)
{
    static ggml_guid guid = {0x6B, 0x76, 0x66, 0x61, 0x73, 0x74, 0x2D, 0x61, 0x74, 0x74, 0x65, 0x6E, 0x74, 0x69, 0x6F, 0x6E};
    ggml_backend_t backend = calloc(1, sizeof *backend);
    context *own = calloc(1, sizeof *own);
    (void)parameters;
    if (!backend || !own) {
        free(backend);
        free(own);
        return NULL;
    }
    own->num_threads = GGML_DEFAULT_N_THREADS;
    backend->guid = &guid;
    backend->iface = backend_interface;
    backend->device = device;
    backend->context = own;
    return backend;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device)
{
    (void)device;
    return ggml_backend_cpu_buffer_type();
}

static ggml_backend_buffer_t device_buffer_from(ggml_backend_dev_t device, void *memory, size_t size, size_t max_tensor_size)
{
    (void)device, (void)max_tensor_size;
    return ggml_backend_cpu_buffer_from_ptr(memory, size);
}

static bool device_supports_op(ggml_backend_dev_t device, const struct ggml_tensor *op)
{
    (void)device;
    switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    case GGML_OP_FLASH_ATTN_EXT:
        return kv_takes(op);
    case GGML_OP_SET_ROWS:
        return stores_rows(op);
    default:
        return false;
    }
}

static bool device_supports_buffer(ggml_backend_dev_t device, ggml_backend_buffer_type_t type)
{
    (void)device;
    return ggml_backend_buft_is_host(type);
}

static const char *reg_name(ggml_backend_reg_t reg)
{
    (void)reg;
    return "KVFAST";
}

static size_t reg_device_count(ggml_backend_reg_t reg)
{
    (void)reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index)
{
    static struct ggml_backend_device device = {
        .iface = {
            .get_name = device_name,
            .get_description = device_description,
            .get_memory = device_memory,
            .get_type = device_type,
            .get_props = device_properties,
            .init_backend = device_init,
            .get_buffer_type = device_buffer_type,
            .buffer_from_host_ptr = device_buffer_from,
            .supports_op = device_supports_op,
            .supports_buft = device_supports_buffer,
        },
    };
    device.reg = reg;
    return index == 0 ? &device : NULL;
}

static void set_num_threads(ggml_backend_t backend, int num_threads)
{
    context *own = backend->context;
    own->num_threads = num_threads;
}

static void use_prefetch_level(int level)
{
    kv_prefetch_level = level;
}

/* Besides ggml's own: how memory is read, the precision, and the tier by name, for tests. */
static void *reg_function(ggml_backend_reg_t reg, const char *name)
{
    (void)reg;
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) return (void *)set_num_threads;
    if (strcmp(name, "kvfast_use_prefetch_level") == 0) return (void *)use_prefetch_level;
    if (strcmp(name, "kvfast_use_precision") == 0) return (void *)kv_use_precision;
    if (strcmp(name, "kvfast_use_isa") == 0) return (void *)kv_use_tier;
    return NULL;
}

static ggml_backend_reg_t kvfast_reg(void)
{
    static struct ggml_backend_reg reg = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {
            .get_name = reg_name,
            .get_device_count = reg_device_count,
            .get_device = reg_device,
            .get_proc_address = reg_function,
        },
    };
    kv_active_tier(); /* which is set by its first call, and two contexts may be made at once */
    return &reg;
}

/* Whether tensors of the ggml of this process are what the headers declare: makes one and reads it. */
static int tensors_fit(void)
{
    char memory[16 << 10];
    struct ggml_init_params parameters = {.mem_size = sizeof memory, .mem_buffer = memory, .no_alloc = true};
    struct ggml_context *own = ggml_init(parameters);
    if (!own) return 0;
    struct ggml_tensor *q = ggml_new_tensor_3d(own, GGML_TYPE_F32, 64, 5, 4), *k = ggml_new_tensor_3d(own, GGML_TYPE_Q8_0, 64, 7, 2);
    struct ggml_tensor *v = ggml_new_tensor_3d(own, GGML_TYPE_F16, 32, 7, 2), *mask = ggml_new_tensor_2d(own, GGML_TYPE_F16, 7, 5);
    struct ggml_tensor *sinks = ggml_new_tensor_1d(own, GGML_TYPE_F32, 4);
    struct ggml_tensor *op = ggml_flash_attn_ext(own, q, k, v, mask, 0.5f, 0.0f, 2.0f);
    float options[3];
    ggml_flash_attn_ext_add_sinks(op, sinks);
    ggml_set_name(op, "kvfast");
    memcpy(options, op->op_params, sizeof options);
    const int fit = op->op == GGML_OP_FLASH_ATTN_EXT && op->src[0] == q && op->src[1] == k && op->src[2] == v && op->src[3] == mask &&
                    op->src[4] == sinks && options[0] == 0.5f && options[2] == 2.0f && strcmp(op->name, "kvfast") == 0 &&
                    k->type == GGML_TYPE_Q8_0 && k->ne[0] == 64 && k->ne[3] == 1 && k->nb[1] == 68 && op->ne[1] == 4 && op->ne[2] == 5;
    ggml_free(own);
    return fit;
}

/* Whether the numbers of operations and types of this process are those of the headers. */
static int numbers_fit(void)
{
    static const struct {
        enum ggml_type type;
        const char *name;
        size_t bytes; /* of 32 elements */
    } types[] = {{GGML_TYPE_F32, "f32", 128}, {GGML_TYPE_F16, "f16", 64}, {GGML_TYPE_BF16, "bf16", 64}, {GGML_TYPE_Q8_0, "q8_0", 34}, {GGML_TYPE_Q4_0, "q4_0", 18}, {GGML_TYPE_Q4_1, "q4_1", 20}, {GGML_TYPE_Q5_0, "q5_0", 22}, {GGML_TYPE_Q5_1, "q5_1", 24}, {GGML_TYPE_IQ4_NL, "iq4_nl", 18}};
    static const struct {
        enum ggml_op op;
        const char *name;
    } ops[] = {{GGML_OP_NONE, "NONE"}, {GGML_OP_RESHAPE, "RESHAPE"}, {GGML_OP_VIEW, "VIEW"}, {GGML_OP_PERMUTE, "PERMUTE"}, {GGML_OP_TRANSPOSE, "TRANSPOSE"}, {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"}, {GGML_OP_SET_ROWS, "SET_ROWS"}, {GGML_OP_MUL_MAT, "MUL_MAT"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(ggml_type_name(types[i].type), types[i].name) || ggml_row_size(types[i].type, 32) != types[i].bytes) return 0;
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (strcmp(ggml_op_name(ops[i].op), ops[i].name)) return 0;
    return 1;
}

/* 0, which means "not supported", unless the ggml of this process is one that this was compiled for: of any version in a wheel, as
   long as its tensors are the same. ggml itself compares GGML_BACKEND_API_VERSION. */
static int score(void)
{
    const size_t object = 32; /* what ggml puts before each tensor */
#ifdef KVFAST_GGML_VERSION
    if (strcmp(ggml_version(), KVFAST_GGML_VERSION)) return 0;
#endif
    return ggml_tensor_overhead() == object + sizeof(struct ggml_tensor) && numbers_fit() && tensors_fit();
}

GGML_BACKEND_DL_IMPL(kvfast_reg)
GGML_BACKEND_DL_SCORE_IMPL(score)
