/* All kernels of one tier, and their table. A file of tiers/ includes it, inside a target region, with KV(name) and KV_ISA set
   and one vec_*.h included before. All functions are static, so that no code of a newer instruction set can leak into code
   that every processor runs. */
#include "rows.inc.h"
#include "rotate.inc.h"
#include "coding.inc.h"
#include "trellis.inc.h"
#include "packed.inc.h"
#include "layout.inc.h"
#include "seal.inc.h"
#include "activations.inc.h"
#include "keys.inc.h"
#include "few_bits.inc.h"
#include "integer.inc.h"
#include "expand.inc.h"
#include "floating.inc.h"
#include "latent.inc.h"
#include "pq.inc.h"
#include "measure.inc.h"
#if W == 16 && defined(KV_VNNI)
#include "words/operands.inc.h"
#include "words/codes.inc.h"
#include "words/exact.inc.h"
#include "words/scores.inc.h"
#include "words/weights.inc.h"
#include "words/panels.inc.h"
/* A region of its own, not one in a region: clang takes the outer one. */
#ifdef KV_BFLOAT16_TARGET
KV_TARGET_END
KV_TARGET_BEGIN(KV_BFLOAT16_TARGET)
#include "words/pairs.inc.h"
#define KV_PAIR_KERNEL(kernel) KV(kernel)
#else
#define KV_PAIR_KERNEL(kernel) NULL
#endif
#undef KV_ATTEND
#define KV_WORDS                                                                                                       \
    .prepare_panel = {KV_OF_CODES(KV(prepare_words)), KV(prepare_words), KV_PAIR_KERNEL(prepare_pairs)},               \
    .attend_panels = {KV_OF_CODES(KV(attend_word_codes)), KV(attend_words), KV_PAIR_KERNEL(attend_pairs)},
#else
#define KV_WORDS
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
#define KV_FLOAT_ROWS_ENTRY(kernel) kernel
#define KV_PACKED_CODES_ENTRY(kernel) KV_OF_CODES(kernel)
#define KV_TILED_CODES_ENTRY(kernel) KV_OF_CODES(kernel)

#define KV_PREPARE(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) \
    KV_##family##_ENTRY(KV(prepare_##prepare)),
#define KV_SCORES(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) \
    KV_##family##_ENTRY(KV(scores_##kernels)),
#define KV_ACCUMULATE(number, name, family, bits, scale, levels, limit, prepare, kernels, ...) \
    KV_##family##_ENTRY(KV(accumulate_##kernels)),
#define KV_TABLE \
    .to_float = {KV(to_float32), KV(to_float16), KV(to_bfloat16)},                                                    \
    .softmax = KV(softmax),                                                                                           \
    .scale_add = KV(scale_add),                                                                                       \
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
        .rotate = KV(rotate),                                                                                         \
        .change_basis = KV(change_basis),                                                                             \
        .transform = KV(transform),                                                                                   \
        .accumulate_latent = KV(accumulate_latent),                                                                   \
        .nearest = KV(nearest),                                                                                       \
        .decode_codes = KV(decode_codes),                                                                             \
        .read_bytes = KV(read_bytes),)

const kv_kernels KV(kv_kernels) = {
    .isa = KV_ISA, KV_TABLE KV_WORDS
    .prepare = {KV_DTYPES(KV_PREPARE)}, .scores = {KV_DTYPES(KV_SCORES)}, .accumulate = {KV_DTYPES(KV_ACCUMULATE)},
    KV_OWN_CACHES(.multiply = {KV(multiply_int8), KV(multiply_float32)})};
#ifdef KV_MORE_KERNELS /* those of a library that is built with these */
#include KV_MORE_KERNELS
#endif
#ifdef KV_MATRIX /* another region */
KV_TARGET_END
KV_TARGET_BEGIN(KV_MATRIX)
#include "amx/operands.inc.h"
#include "amx/weights.inc.h"
#include "amx/products_int8.inc.h"
#include "amx/products_bfloat16.inc.h"
#include "amx/matrix.inc.h"
#include "amx/few_rows.inc.h"
/* Codes are multiplied by the matrix unit for few rows, too. */
#define KV_FLOAT_ROWS_KERNEL(step, name) KV(step##_##name),
#define KV_PACKED_CODES_KERNEL(step, name) KV_OF_CODES(KV(step##_matrix_##name)),
#define KV_TILED_CODES_KERNEL(step, name) KV_OF_CODES(KV(step##_matrix_##name)),
#define KV_FLOAT_ROWS_PREPARE(name) KV(prepare_##name),
#define KV_PACKED_CODES_PREPARE(name) KV_OF_CODES(KV(prepare_##name)),
#define KV_TILED_CODES_PREPARE(name) KV_OF_CODES(KV(prepare_matrix_##name)),
#define KV_PREPARE_MATRIX(number, name, family, bits, scale, levels, limit, prepared_by, kernels, ...) \
    KV_##family##_PREPARE(prepared_by)
#define KV_SCORES_MATRIX(number, name, family, bits, scale, levels, limit, prepared_by, kernels, ...) \
    KV_##family##_KERNEL(scores, kernels)
#define KV_ACCUMULATE_MATRIX(number, name, family, bits, scale, levels, limit, prepared_by, kernels, ...) \
    KV_##family##_KERNEL(accumulate, kernels)
const kv_kernels kv_kernels_amx = {
    .isa = "amx", KV_TABLE
    .prepare = {KV_DTYPES(KV_PREPARE_MATRIX)}, .scores = {KV_DTYPES(KV_SCORES_MATRIX)},
    .accumulate = {KV_DTYPES(KV_ACCUMULATE_MATRIX)},
    .open_matrix = KV(open_matrix), .close_matrix = KV(close_matrix),
    KV_OWN_CACHES(.multiply = {KV(multiply_tiles), KV(multiply_float32)},)
    .prepare_panel = {KV_OF_CODES(KV(prepare_panel)), KV(prepare_halves)},
    .attend_panels = {KV_OF_CODES(KV(attend_integers)), KV(attend_halves)}};
#endif
