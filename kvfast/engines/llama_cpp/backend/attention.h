/* GGML_OP_FLASH_ATTN_EXT on tensors in host memory. */
#ifndef KVFAST_GGML_ATTENTION_H
#define KVFAST_GGML_ATTENTION_H

#include "ggml.h"

#include <stdbool.h>

/* Memory that calls work in; it grows, and belongs to one backend. Zero it before the first call. */
typedef struct {
    char *memory;
    size_t size;
} kv_workspace;

/* Whether there are kernels for rows of a type. */
bool kv_takes_type(enum ggml_type type);
/* Whether kv_flash_attention computes this operation. */
bool kv_takes(const struct ggml_tensor *op);
/* Computes it with at most num_threads threads. Returns false if there is not enough memory. The result is the same bits for
   every number of threads. */
bool kv_flash_attention(const struct ggml_tensor *op, int num_threads, kv_workspace *workspace);
void kv_release(kv_workspace *workspace);

#endif
