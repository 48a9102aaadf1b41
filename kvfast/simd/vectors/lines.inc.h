/* Multiplies lines of codes of all vectors of a quad by its rows, with the names that the loops over lines have: two lines, 8 depths,
   with activations at `x` and `y`; or the KV_INT8_LINES of INT8 that a loop takes at once, line i of vector v from load(i). Tiers with
   products of matrices (vpair) make one of two lines, others two. Their activations are at `x` alone. */
#ifdef vpair
#define KV_INT8_LINES 2
#define KV_MULTIPLY_LINES(first, x, second, y)                                                                   \
    do {                                                                                                         \
        vpair pair[4];                                                                                           \
        KV_FOR4(v, vectors, pair[v] = vpair_of(first, second););                                                 \
        KV_FOR4(r, rows, KV_FOR4(v, vectors, vpair_dot(a[r][v], b[r][v], pair[v], (x) + 16 * r););); \
    } while (0)
#define KV_MULTIPLY_INT8(load, x) KV_MULTIPLY_LINES(vcodes_bytes(load(0)), x, vcodes_bytes(load(1)), x)
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
#define KV_INT8_LINES 1
#define KV_MULTIPLY_LINE(codes, x)                                                                 \
    do {                                                                                           \
        vwide wide[4];                                                                             \
        KV_FOR4(v, vectors, wide[v] = vcodes_widen(codes););                                       \
        KV_FOR4(r, rows, KV_FOR4(v, vectors, vacc_dot(a[r][v], b[r][v], wide[v], (x) + 8 * r););); \
    } while (0)
#define KV_MULTIPLY_LINES(first, x, second, y) \
    do {                                       \
        KV_MULTIPLY_LINE(first, x);            \
        KV_MULTIPLY_LINE(second, y);           \
    } while (0)
#if W == 16 /* load after the products of the last load: faster from memory */
#define KV_MULTIPLY_INT8(load, x)                                             \
    KV_FOR4(v, vectors,                                                       \
        const vwide wide = vcodes_widen(vcodes_bytes(load(0)));               \
        KV_FOR4(r, rows, vacc_dot(a[r][v], b[r][v], wide, (x) + 8 * r);););
#else
#define KV_MULTIPLY_INT8(load, x) KV_MULTIPLY_LINE(vcodes_bytes(load(0)), x)
#endif
#define KV_TOTAL(a, b) vacc_total(a, b)
#endif
