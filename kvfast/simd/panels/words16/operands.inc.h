/* Queries, keys and values as words, integers of 16 bits, and how these are multiplied; codes.inc.h has what is stored as codes.

   A processor without a matrix unit multiplies twice as many words as floats (vpdpwssd). A line of 64 bytes has 16 lanes of two
   words each, which meet the two words of a lane in another line:

     queries  (padded_dim / 2, 16 rows, 2 words)        keys     (tokens / 16, padded_dim / 2, 16 tokens, 2 words)
     weights  (tokens / 2, 16 rows, 2 tokens)           values   (padded_dim / 16, tokens / 2, 16 elements, 2 tokens)

   A row that sees all tokens of a tile reads float rows of keys less their mean, as keys of a model have much in common; the mean's
   product with the query is added in float32. Other rows read them as they are, because the other tokens of their tile depend on the
   other rows.

   Elements of float rows are at most 32767. The products of KV_WORD_SET elements are summed up, a set, and then as floats. The norm of
   each set of a query or key is at most KV_WORD_NORM. With the rounding,
       |sum q k| <= (46300 + sqrt(32) / 2)^2 = 2 143 951 893 < 2^31,
   and so is each part of the sum. A score's standard error is 0.29 sqrt(q_unit^2 |k|^2 + |q|^2 k_unit^2). Where it can be more than
   least_errors allows, the score is computed in float32; only the row and the tiles decide this.

   Values of float rows are at most KV_MOST_VALUE, 14 bits relative to the largest element of their row. Its scale is folded into the
   weights, whose sum over KV_WORD_GROUP tokens is at most KV_MOST_WEIGHTS; what their rounding carries on adds less than 4:
       |sum w v| <= (131050 + 4) * 16383 = 2 147 057 682 < 2^31. */
#define KV_WORD_SET 32
#define KV_WORD_NORM 46300.0f
#define KV_MOST_VALUE 16383.0f
#define KV_MOST_WEIGHTS 131050.0f

enum {
    WORD_GROUPS = KV_MATRIX_TILE / KV_WORD_GROUP,
    /* Bytes of 16 elements of values. A processor confuses the addresses of stores that are a multiple of a page apart. */
    VALUE_STRIDE = KV_TILE * 32 + 64,
};

/* Rounds 16 rows of n floats, queries or keys, to words whose sets have at most this norm. Writes their units and the squares of their
   norms. */
static void KV(put_word_lane)(const float *rows, ptrdiff_t stride, int n, float norm, int8_t *out, float *units,
                              float *squares)
{
    KV_ALIGNED float part[KV_LANES * W], factor[KV_LANES];
    KV_ALIGNED int8_t lines[1024], half[1024];
    for (int r = 0; r < KV_LANES; r++) {
        vf largest = vf_set1(0.0f);
        for (int i = 0; i < n; i += W) largest = vf_max(largest, vf_abs(vf_load(rows + r * stride + i)));
        vf_store(part + r * W, largest);
    }
    const vf peaks = KV(reduce_rows)(part, 1), inverse = vf_zero_below(vf_div(vf_set1(1.0f), peaks), peaks, 0x1p-100f);
    /* For each row, with its largest element: the largest square of a set's norm, and the sum of all squares. */
    vf most = vf_set1(0.0f), sum = most;
    vf_store(factor, inverse);
    for (int first = 0; first < n; first += KV_WORD_SET) {
        const int stop = first + KV_WORD_SET < n ? first + KV_WORD_SET : n;
        for (int r = 0; r < KV_LANES; r++) {
            vf square = vf_set1(0.0f);
            for (int i = first; i < stop; i += W) {
                const vf element = vf_mul(vf_load(rows + r * stride + i), vf_set1(factor[r]));
                square = vf_fma(element, element, square);
            }
            vf_store(part + r * W, square);
        }
        const vf squares_of_set = KV(reduce_rows)(part, 0);
        most = vf_max(most, squares_of_set);
        sum = vf_add(sum, squares_of_set);
    }
    /* `most` is at least 1, or the row is 0. */
    const vf size = vf_min(vf_div(vf_set1(norm), _mm512_sqrt_ps(vf_max(most, vf_set1(1.0f)))), vf_set1(32767.0f));
    const vi low_words = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,
                                          30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    vf_store(factor, vf_mul(inverse, size));
    vf_store(units, vf_div(peaks, size));
    vf_store(squares, vf_mul(sum, vf_mul(peaks, peaks)));
    for (int i = 0; i < n; i += 2 * W, out += 1024) {
        for (int r = 0; r < KV_LANES; r++) {
            const float *at = rows + r * stride + i;
            const vi a = vf_round(vf_mul(vf_load(at), vf_set1(factor[r])));
            const vi b = i + W < n ? vf_round(vf_mul(vf_load(at + W), vf_set1(factor[r]))) : vi_set1(0);
            _mm512_store_si512(lines + 64 * r, _mm512_permutex2var_epi16(a, low_words, b));
        }
        if (i + W < n) {
            KV(transpose_lines)(lines, out);
            continue;
        }
        KV(transpose_lines)(lines, half);
        memcpy(out, half, 512);
    }
}

/* Keys as words, and the rows or blocks that they come from. */
typedef struct {
    int family, dim, dtype;
    const char *rows[KV_MATRIX_TILE];                         /* float rows */
    int8_t *words;
    float *means;                                             /* of float rows, which the words are less; or of blocks of codes, */
    const float *channels;                                    /* (blocks, KV_MAX_HEAD_DIM); the scales of their channels, or NULL */
    int has_means;
    int block_of[KV_TILE / KV_LANES];                         /* of 16 tokens; the mean of float rows is that of block 0 */
    float error;                                              /* of codes: see error_of_unit */
    float most_unit, most_square;
    KV_ALIGNED float units[KV_TILE], squares[KV_MATRIX_TILE]; /* of the words, and of the norm of float rows */
} KV(word_keys);

/* The largest of `count` numbers, in whole lane tiles. */
static inline float KV(find_most)(const float *numbers, int count)
{
    vf most = vf_set1(0.0f);
    for (int t = 0; t < count; t += KV_LANES) most = vf_max(most, vf_load(numbers + t));
    return vf_hmax(most);
}

/* Calls load(dtype) with a constant dtype of floats, so that no element asks for it. */
#define KV_BY_DTYPE(dtype, load)                              \
    do {                                                      \
        if (dtype == KV_FLOAT32) load(KV_FLOAT32);            \
        else if (dtype == KV_FLOAT16) load(KV_FLOAT16);       \
        else load(KV_BFLOAT16);                               \
    } while (0)

/* The mean of the keys of a whole tile. */
static inline __attribute__((always_inline)) void KV(average_keys)(KV(word_keys) *keys, const int dtype)
{
    for (int i = 0; i < keys->dim; i += 4 * W) {
        const int vectors = (keys->dim - i) / W < 4 ? (keys->dim - i) / W : 4;
        vf sum[4];
        KV_FOR4(v, 4, sum[v] = vf_set1(0.0f););
        for (int t = 0; t < KV_MATRIX_TILE; t++)
            KV_FOR4(v, 4, if (v < vectors) sum[v] = vf_add(sum[v], KV(load_as)(keys->rows[t], i + v * W, dtype)););
        KV_FOR4(v, 4, if (v < vectors) vf_store(keys->means + i + v * W, vf_mul(sum[v], vf_set1(1.0f / KV_MATRIX_TILE))););
    }
}

/* Loads `count` float rows of keys, less their mean if they have one. */
static inline __attribute__((always_inline)) void KV(load_key_rows)(KV(word_keys) *keys, int count, float *rows, const int dtype)
{
    enum { STRIDE = KV_MAX_HEAD_DIM + W }; /* no multiple of a page */
    const int n = keys->dim;
    int8_t *out = keys->words;
    if (keys->has_means) KV(average_keys)(keys, dtype);
    else memset(keys->means, 0, (size_t)n * sizeof(float));
    for (int t = 0; t < count; t += KV_LANES, out += n * 32) {
        for (int r = 0; r < KV_LANES; r++)
            for (int i = 0; i < n; i += W)
                vf_store(rows + r * STRIDE + i, vf_sub(KV(load_as)(keys->rows[t + r], i, dtype), vf_load(keys->means + i)));
        KV(put_word_lane)(rows, STRIDE, n, KV_WORD_NORM, out, keys->units + t, keys->squares + t);
    }
}

/* Loads float rows of keys, if `less_mean` is 1 less their mean. */
static void KV(load_key_words)(const kv_side *side, const kv_tile *tile, int less_mean, kv_operands *operands, KV(word_keys) *keys)
{
    const int count = KV(find_rows)(side, tile, KV_LANES, keys->rows);
    keys->has_means = less_mean, keys->channels = NULL;
    memset(keys->block_of, 0, sizeof keys->block_of);
#define KV_LOAD(dtype) KV(load_key_rows)(keys, count, operands->rows, dtype)
    KV_BY_DTYPE(side->dtype, KV_LOAD);
#undef KV_LOAD
    keys->most_unit = KV(find_most)(keys->units, count), keys->most_square = KV(find_most)(keys->squares, count);
}

/* The root mean square of values as words; a weight's rounding is taken twice, because the next weight takes it back. */
static inline float KV(size_of_values)(float squares, int elements)
{
    return __builtin_sqrtf(2.0f * squares / (float)elements);
}

/* Loads `count` float rows of values; returns the sum of their squares. */
static inline __attribute__((always_inline)) float KV(round_values)(const char *const *rows, int count, int n, int8_t *out,
                                                                    float *units, const int dtype)
{
    KV_ALIGNED float part[KV_LANES * W], factor[KV_LANES];
    vf squares = vf_set1(0.0f);
    for (int first = 0; first < count; first += KV_LANES) {
        for (int t = 0; t < KV_LANES; t++) {
            vf largest = vf_set1(0.0f);
            for (int i = 0; i < n; i += W) largest = vf_max(largest, vf_abs(KV(load_as)(rows[first + t], i, dtype)));
            vf_store(part + t * W, largest);
        }
        const vf peaks = KV(reduce_rows)(part, 1);
        vf_store(factor, vf_zero_below(vf_div(vf_set1(KV_MOST_VALUE), peaks), peaks, 0x1p-100f));
        /* Finite, as a weight of 0 is multiplied with it: a row that nobody sees may be anything. */
        vf_store(units + first, vf_min(vf_mul(peaks, vf_set1(1.0f / KV_MOST_VALUE)), vf_set1(KV_MAX_FLOAT32)));
        for (int t = 0; t < KV_LANES; t += 2, out += 64) {
            const char *one = rows[first + t], *other = rows[first + t + 1];
            for (int i = 0; i < n; i += W) {
                const vi a = vf_round(vf_mul(KV(load_as)(one, i, dtype), vf_set1(factor[t])));
                const vi b = vf_round(vf_mul(KV(load_as)(other, i, dtype), vf_set1(factor[t + 1])));
                const vi words = _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_slli_epi32(b, 16));
                squares = vf_add(squares, vi_to_float(_mm512_madd_epi16(words, words))); /* at most 2 * 16383^2 < 2^31 */
                _mm512_store_si512(out + i / W * VALUE_STRIDE, words);
            }
        }
    }
    return vf_hsum(squares);
}

/* Loads float rows of values. */
static void KV(load_value_words)(const kv_side *side, const kv_tile *tile, kv_operands *operands)
{
    const char *rows[KV_MATRIX_TILE];
    const int n = side->padded_dim, count = KV(find_rows)(side, tile, KV_LANES, rows);
    float squares;
#define KV_LOAD(dtype) squares = KV(round_values)(rows, count, n, operands->values, operands->value_scales, dtype)
    KV_BY_DTYPE(side->dtype, KV_LOAD);
#undef KV_LOAD
    operands->code_size = KV(size_of_values)(squares, count * n);
    operands->usual_size = KV_MOST_VALUE / 127.0f * KV_CODE_SIZE(KV_INT8);
    operands->most_weights = KV_MOST_WEIGHTS;
    operands->group = KV_WORD_GROUP;
}
