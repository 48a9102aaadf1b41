/* kvfast's kernels and those of ggml_rows.inc.h, once per instruction set; and the choice between them. */
#include "ggml_rows.h"

#include <stdlib.h>

#define GGML_COMMON_DECL_C
#define GGML_COMMON_IMPL_C
#include "ggml-common.h"

#define KV_MORE_KERNELS "llama_cpp/backend/ggml_rows.inc.h"
#include "simd/dispatch.c"

static const kv_row_kernels *const row_kernels[] = {
#if KV_X86
    &row_kernels_avx512_vbmi,
    &row_kernels_avx512_vnni,
    &row_kernels_avx512,
#if KV_HAVE_AVX_VNNI
    &row_kernels_avx_vnni,
#endif
    &row_kernels_avx2,
#if KV_SSE2
    &row_kernels_sse2,
#endif
#endif
#if KV_HAVE_DOTPROD
    &row_kernels_neon_dotprod,
#endif
#if KV_ARM64
    &row_kernels_neon,
#endif
    &row_kernels_scalar,
};

/* Those of the tier "amx" are compiled with "avx512_vbmi". */
static const kv_row_kernels *rows_of(const char *isa)
{
    if (strcmp(isa, "amx") == 0) isa = "avx512_vbmi";
    for (size_t i = 0; i < sizeof row_kernels / sizeof *row_kernels; i++)
        if (strcmp(row_kernels[i]->isa, isa) == 0) return row_kernels[i];
    return NULL;
}

static kv_tier active;

int kv_use_tier(const char *isa)
{
    for (const kv_kernels *const *kernels = kv_all_kernels; *kernels; kernels++) {
        if ((isa && strcmp((*kernels)->isa, isa)) || !kv_supported(*kernels)) continue;
        active.attention = *kernels;
        active.rows = rows_of((*kernels)->isa);
        return 1;
    }
    return 0;
}

kv_tier kv_active_tier(void)
{
    if (!active.attention && !kv_use_tier(getenv("KVFAST_ISA"))) kv_use_tier(NULL);
    return active;
}

void kv_save_matrix(const kv_tier *tier, kv_matrix_state *state)
{
#if KV_HAVE_AMX
    if (tier->attention == &kernels_amx) __asm__ volatile("sttilecfg %0" : "=m"(*state));
#endif
    (void)tier, (void)state;
}

void kv_restore_matrix(const kv_tier *tier, const kv_matrix_state *state)
{
#if KV_HAVE_AMX
    if (tier->attention == &kernels_amx) __asm__ volatile("ldtilecfg %0" : : "m"(*state));
#endif
    (void)tier, (void)state;
}
