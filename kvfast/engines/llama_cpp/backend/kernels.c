/* The choice between the tiers of kvfast's kernels and of those of ggml_rows.inc.h. */
#include "ggml_rows.h"
#include "simd/platform.h"

#include <stdlib.h>
#include <string.h>

#define KV_DECLARE(tier) extern const kv_row_kernels kv_row_kernels_##tier;
KV_VECTOR_TIERS(KV_DECLARE)
#define KV_ADDRESS(tier) &kv_row_kernels_##tier,
static const kv_row_kernels *const row_kernels[] = {KV_VECTOR_TIERS(KV_ADDRESS)};

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
        kv_begin();
        active.attention = *kernels;
        active.fast = kv_fast(*kernels);
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

static kv_precision precision;

int kv_use_precision(const char *name)
{
    static const char *const names[] = {"exact", "fast", "invariant"};
    int known = KV_PRECISION_INVARIANT;
    while (known && strcmp(name, names[known - 1])) known--;
    if (known) precision = (kv_precision)known;
    return known != KV_PRECISION_UNSET;
}

kv_precision kv_active_precision(void)
{
    const char *name = getenv("KVFAST_PRECISION");
    if (!precision && !(name && kv_use_precision(name))) precision = KV_PRECISION_EXACT;
    return precision;
}

/* Functions of their own, by whose names ci/audit_instructions.py knows that only processors with a matrix unit run them. */
#if KV_HAVE_AMX
__attribute__((noinline)) static void save_amx(kv_matrix_state *state) { __asm__ volatile("sttilecfg %0" : "=m"(*state)); }
__attribute__((noinline)) static void restore_amx(const kv_matrix_state *state) { __asm__ volatile("ldtilecfg %0" : : "m"(*state)); }
#endif

void kv_save_matrix(const kv_tier *tier, kv_matrix_state *state)
{
#if KV_HAVE_AMX
    if (tier->attention == &kv_kernels_amx) save_amx(state);
#endif
    (void)tier, (void)state;
}

void kv_restore_matrix(const kv_tier *tier, const kv_matrix_state *state)
{
#if KV_HAVE_AMX
    if (tier->attention == &kv_kernels_amx) restore_amx(state);
#endif
    (void)tier, (void)state;
}
