/* Multiplies lines of codes of all vectors of a quad by its rows, with the names that the loops over lines have: two lines, 8 depths,
   with activations at `x` and `y`; or as many lines of INT8 as a loop takes at once, KV_INT8_LINES, line i of vector v from load(i).
   Tiers with products of matrices (vpair) make one of two lines, others two. Their activations are at `x` alone. */
#ifdef vpair
#define KV_INT8_LINES(rows) 2
#define KV_MULTIPLY_LINES(first, x, second, y)                                                       \
    do {                                                                                             \
        vpair pair[4];                                                                               \
        KV_FOR4(v, vectors, pair[v] = vpair_of(first, second););                                     \
        KV_FOR4(r, rows, KV_FOR4(v, vectors, vpair_dot(a[r][v], b[r][v], pair[v], (x) + 16 * r););); \
    } while (0)
#define KV_MULTIPLY_INT8(load, x) KV_MULTIPLY_LINES(vcodes_bytes(load(0)), x, vcodes_bytes(load(1)), x)
#define KV_MULTIPLY_LEVELS(first, x, second, y) KV_MULTIPLY_LINES(first, x, second, y)
#define KV_TOTAL(a, b) vpair_total(a, b)

/* The channel of keys with channel scales that activation i of a folded row, i a multiple of 4, belongs to. The lines of a unit that
   are multiplied together need not lie side by side, so the activations are in the order in which KV_EACH_KEY_LINES calls. */
static inline ptrdiff_t KV(channel_at)(const kv_key_order *order, int dtype, ptrdiff_t i)
{
    const ptrdiff_t u = i / KV_UNIT, line = i / 4 % 4;
    const uint8_t *lines = (line == 2) == (dtype == KV_INT4) ? order->wide : order->narrow;
    return 4 * (ptrdiff_t)(line < 2 ? order->even[2 * u + line] : lines[u]);
}
#define KV_CHANNEL_AT(order, dtype, i) KV(channel_at)(order, dtype, i)
#else
#define KV_CHANNEL_AT(order, dtype, i) (i)
#ifndef KV_ONE_SUM
#define KV_ONE_SUM 0
#endif
#define KV_INT8_LINES(rows) (KV_ONE_SUM && W < 16 && (rows) == 1 ? 2 : 1)
#define KV_MULTIPLY_INTO(a, b, codes, x)                                                                       \
    do {                                                                                                       \
        vwide wide[4];                                                                                         \
        KV_FOR4(v, vectors, wide[v] = vcodes_widen(codes););                                                   \
        KV_MULTIPLY_WIDE(a, b, wide, x);                                                                       \
    } while (0)
#ifdef vquad_load /* activations of all rows in one register */
#define KV_MULTIPLY_WIDE(a, b, wide, x)   \
    const vquad quad = vquad_load(x);     \
    KV_FOR4(r, rows, KV_FOR4(v, vectors, vquad_dot(a[r][v], wide[v], quad, r);););
#else
#define KV_MULTIPLY_WIDE(a, b, wide, x) \
    KV_FOR4(r, rows, KV_FOR4(v, vectors, vacc_dot(a[r][v], b[r][v], wide[v], (x) + 4 * KV_PARTS * r););)
#endif
#define KV_MULTIPLY_LINE(codes, x) KV_MULTIPLY_INTO(a, b, codes, x)
/* Lines of levels, which have 8 bits. Where a row has one sum (KV_ONE_SUM), and products that add to it take long, a row alone has a
   sum for each line of two. */
#define KV_MULTIPLY_LEVELS(first, x, second, y)                         \
    do {                                                                \
        KV_MULTIPLY_LINE(first, x);                                     \
        if (KV_ONE_SUM && rows == 1) KV_MULTIPLY_INTO(b, a, second, y); \
        else KV_MULTIPLY_LINE(second, y);                               \
    } while (0)
#ifdef KV_SHORT_CODES
#define KV_MULTIPLY_LINES(first, x, second, y)                                                                    \
    do {                                                                                                          \
        vcodes one[4], other[4];                                                                                  \
        KV_FOR4(v, vectors, one[v] = first; other[v] = second;);                                                  \
        KV_FOR4(r, rows, KV_FOR4(v, vectors, vlines_dot(a[r][v], one[v], (x) + 4 * r, other[v], (y) + 4 * r););); \
    } while (0)
#else
#define KV_MULTIPLY_LINES(first, x, second, y) KV_MULTIPLY_LEVELS(first, x, second, y)
#endif
#if W == 16 /* load after the products of the last load: faster from memory */
#define KV_MULTIPLY_INT8(load, x)                                             \
    KV_FOR4(v, vectors,                                                       \
        const vwide wide = vcodes_widen(vcodes_bytes(load(0)));               \
        KV_FOR4(r, rows, vacc_dot(a[r][v], b[r][v], wide, (x) + 4 * KV_PARTS * r);););
#else
#define KV_MULTIPLY_INT8(load, x)                                                                              \
    if (KV_INT8_LINES(rows) == 1) KV_MULTIPLY_LINE(vcodes_bytes(load(0)), x);                                  \
    else KV_MULTIPLY_LEVELS(vcodes_bytes(load(0)), x, vcodes_bytes(load(1)), (x) + KV_QUAD_BYTES)
#endif
#define KV_TOTAL(a, b) vacc_total(a, b)
#endif
