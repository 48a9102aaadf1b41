/* All kernels of one tier, and their table. A file of tiers/ includes it, inside a target region, with KV(name) and KV_ISA set
   and one vec_*.h included before. All functions are static, so that no code of a newer instruction set can leak into code
   that every processor runs. With KV_FAST 1, the table has only what the fast precision takes from it. With KV_BASE, the table of
   another tier, it has only what multiplies codes. kv_begin fills in the rest. */
#include "precision.h"
#if KV_FAST || defined(KV_BASE)
#pragma GCC diagnostic ignored "-Wunused-function" /* those that no entry of the table names */
#endif
#include "vectors/rows.inc.h"
#include "coding/rotate.inc.h"
#include "coding/coding.inc.h"
#include "coding/packed.inc.h"
#include "coding/layout.inc.h"
#include "coding/seal.inc.h"
#include "vectors/lines.inc.h"
#include "vectors/activations.inc.h"
#include "vectors/keys.inc.h"
#include "vectors/few_bits.inc.h"
#include "vectors/integer.inc.h"
#include "vectors/expand.inc.h"
#include "vectors/floating.inc.h"
#include "vectors/latent.inc.h"
#include "vectors/pq.inc.h"
#include "vectors/measure.inc.h"
#if W == 16 && defined(KV_VNNI)
#define KV_HAS_PANELS 1
#include "panels/shared.inc.h"
#if !KV_FAST
#include "panels/words16/operands.inc.h"
#include "panels/words16/codes.inc.h"
#include "panels/words16/exact.inc.h"
#include "panels/words16/scores.inc.h"
#include "panels/words16/weights.inc.h"
#include "panels/words16/panels.inc.h"
#endif
#else
#define KV_HAS_PANELS 0
#endif

/* A library that reads the caches of others, which are rows of floats to the kernels here, leaves out all that is for codes and for
   storing. Compilers drop what no table names. */
#ifdef KV_MORE_KERNELS
#define KV_OWN_CACHES(...)
#define KV_OF_CODES(kernel) NULL
#else
#define KV_OWN_CACHES(...) __VA_ARGS__
#define KV_OF_CODES(kernel) kernel
#endif
/* The fast precision has kernels of codes alone. Where these must be short, other kernels would gain less than a tenth. */
#if KV_FAST
#define KV_EXACT(...)
#else
#define KV_EXACT(...) __VA_ARGS__
#endif
#if KV_FAST || defined(KV_BASE)
#define KV_OF_FLOATS(kernel) NULL
#else
#define KV_OF_FLOATS(kernel) kernel
#endif
#define KV_FLOAT_ROWS_ENTRY(kernel) KV_OF_FLOATS(kernel)
#define KV_PACKED_CODES_ENTRY(kernel) KV_OF_CODES(kernel)
#define KV_TILED_CODES_ENTRY(kernel) KV_OF_CODES(kernel)
#define KV_FLOAT_ROWS_LATENT(kernels) KV_OF_CODES(KV_OF_FLOATS(KV(accumulate_##kernels)))
#define KV_PACKED_CODES_LATENT(kernels) KV_OF_CODES(KV(accumulate_transposed))
#define KV_TILED_CODES_LATENT(kernels) KV_OF_CODES(KV(accumulate_transposed))

#define KV_PREPARE(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) \
    KV_##family##_ENTRY(KV(prepare_##prepare)),
#define KV_SCORES(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) \
    KV_##family##_ENTRY(KV(scores_##kernels)),
#define KV_ACCUMULATE(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) \
    KV_##family##_ENTRY(KV(accumulate_##kernels)),
#define KV_LATENT(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) KV_##family##_LATENT(kernels),
#define KV_TABLE \
    .to_float = {KV(to_float32), KV(to_float16), KV(to_bfloat16)},                                                    \
    .softmax = KV(softmax),                                                                                           \
    .scale_add = KV(scale_add),                                                                                       \
    .scale_add_double = KV(scale_add_double),                                                                         \
    .rows_to_refine = KV(rows_to_refine),                                                                             \
    KV_OWN_CACHES(                                                                                                    \
        .from_float = {KV(from_float32), KV(from_float16), KV(from_bfloat16)},                                        \
        .find_unstorable = KV(find_unstorable),                                                                       \
        .quantize = KV(quantize),                                                                                     \
        .dequantize = KV(dequantize),                                                                                 \
        .store_nontemporal = kv_store_nontemporal,                                                                    \
        .encode_k = KV(encode_k),                                                                                     \
        .encode_v = KV(encode_v),                                                                                     \
        .decode_k = KV(decode_k),                                                                                     \
        .decode_v = KV(decode_v),                                                                                     \
        .seal_k = KV(seal_k),                                                                                         \
        .copy_token = KV(copy_token),                                                                                 \
        .copy_run = KV(copy_run),                                                                                     \
        .rotate = KV(rotate),                                                                                         \
        .change_basis = KV(change_basis),                                                                             \
        .transform = KV(transform),                                                                                   \
        .nearest = KV(nearest),                                                                                       \
        .decode_codes = KV(decode_codes),                                                                             \
        .read_bytes = KV(read_bytes),)
#define KV_ATTENTION                                                                                                  \
    .prepare = {KV_DTYPES(KV_PREPARE)}, .scores = {KV_DTYPES(KV_SCORES)}, .accumulate = {KV_DTYPES(KV_ACCUMULATE)},   \
    .accumulate_latent = {KV_DTYPES(KV_LATENT)},
#ifdef KV_BASE
#undef KV_TABLE
#define KV_TABLE .base = &KV_BASE,
#endif
#ifdef KV_SHORT_CODES
#undef KV_ATTENTION
#define KV_ATTENTION                                                                                                  \
    .prepare = {[KV_INT4] = KV(prepare_int4)}, .scores = {[KV_INT4] = KV(scores_int4)},                               \
    .accumulate = {[KV_INT4] = KV(accumulate_int4), [KV_GAUSS4] = KV(accumulate_gauss4)},
#endif

#if KV_FAST
#if defined(KV_MATRIX) /* vectors are those of another file */
#undef KV_ATTENTION
#define KV_ATTENTION
#endif
#endif

/* Kernels of panels, for .panels: those that a family of this name has. */
#define KV_FAMILY(family, tile, attend) {#family, tile, KV(prepare_##family), KV(attend)}
#if !KV_HAS_PANELS
#define KV_PANEL_TABLE
#elif !KV_FAST
#define KV_PANEL_TABLE                                                                                \
    .panels = {KV_OWN_CACHES([KV_PANELS_OF_CODES] = KV_FAMILY(words16, KV_TILE, attend_words16_codes),         \
                             [KV_PANELS_OF_PACKED] = KV_FAMILY(words16, KV_TILE, attend_words16_codes),)       \
               [KV_PANELS_OF_ROWS] = KV_FAMILY(words16, KV_MATRIX_TILE, attend_words16_rows)},
#else
#include "panels/tiles.inc.h"
#ifdef KV_MORE_KERNELS
#define KV_PANEL_TABLE .panels = {[KV_PANELS_OF_ROWS] = KV_FAMILY(tiles8, KV_MATRIX_TILE, attend_tiles8)},
#else
#define KV_PANEL_TABLE .panels = {[KV_PANELS_OF_CODES] = KV_FAMILY(tiles8, KV_TILE, attend_tiles8)},
#endif
#endif

kv_kernels KV(kv_kernels) = {
    .isa = KV_ISA, KV_ATTENTION KV_PANEL_TABLE
    KV_EXACT(KV_TABLE KV_OWN_CACHES(.multiply = {KV(multiply_int8), KV(multiply_float32)}))};
#if defined(KV_MORE_KERNELS) && !KV_FAST /* those of a library that is built with these */
#include KV_MORE_KERNELS
#endif
#if defined(KV_MATRIX) && !KV_FAST /* another region */
KV_TARGET_END
KV_TARGET_BEGIN(KV_MATRIX)
#include "panels/tiles.inc.h"
kv_kernels KV_OF_TIER(kv_kernels, amx) = {
    .isa = "amx", KV_ATTENTION KV_TABLE
    KV_OWN_CACHES(.multiply = {KV(multiply_tiles), KV(multiply_float32)},)
    .has_matrix = 1,
    .panels = {KV_OWN_CACHES([KV_PANELS_OF_CODES] = KV_FAMILY(tiles8, KV_TILE, attend_tiles8),)
               [KV_PANELS_OF_ROWS] = KV_FAMILY(tiles_bf16, KV_MATRIX_TILE, attend_tiles_bf16)}};
#endif
