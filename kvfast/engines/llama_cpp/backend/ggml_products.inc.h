/* Products of many query rows with strips of floats: what prompts take without a matrix unit. No sum across lanes is needed, and
   conversions are shared by all rows of a task.

   A strip of values has a row per token and KV_COLUMNS elements of it; one of keys has a row per element and KV_COLUMNS tokens. Heads
   of 128 make 16 KB of each, which stay in the first cache while all rows of a task pass by. */

/* c[r][j] = c[r][j] x factors[r] (0 without factors) + sum a[r][i] b[i][j], for two vectors of columns. */
static inline __attribute__((always_inline)) void KV(multiply_rows)(
    const float *a, ptrdiff_t a_stride, const float *b, int depth, const float *factors, float *c, ptrdiff_t c_stride,
    const int rows)
{
    vf sum[8][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++)
            sum[r][v] = factors ? vf_mul(vf_load(c + r * c_stride + v * W), vf_set1(factors[r])) : vf_set1(0.0f);
    for (int i = 0; i < depth; i++, b += KV_COLUMNS) {
        const vf low = vf_load(b), high = vf_load(b + W);
        for (int r = 0; r < rows; r++) {
            const vf x = vf_set1(a[r * a_stride + i]);
            sum[r][0] = vf_fma(x, low, sum[r][0]);
            sum[r][1] = vf_fma(x, high, sum[r][1]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) vf_store(c + r * c_stride + v * W, sum[r][v]);
}

static void KV(multiply_float_strip)(
    const float *a, ptrdiff_t a_stride, int rows, const float *b, int depth, const float *factors, float *c, ptrdiff_t c_stride)
{
    enum { ROWS = W == 16 ? 8 : 4 }; /* 16 accumulators, or 8 */
    for (int column = 0; column < KV_COLUMNS; column += 2 * W)
        for (int r = 0, some; r < rows; r += some) {
            some = rows - r >= ROWS ? ROWS : 1;
            const float *from = a + r * a_stride, *by = factors ? factors + r : NULL;
            float *to = c + r * c_stride + column;
            if (some == ROWS) KV(multiply_rows)(from, a_stride, b + column, depth, by, to, c_stride, ROWS);
            else KV(multiply_rows)(from, a_stride, b + column, depth, by, to, c_stride, 1);
        }
}

/* The order in which vf_sum4 adds up four lanes, and (W == 16) four lots of four. */
#if W == 16
#define KV_ORDER(i) (2 * ((i) % 2) + (i) / 2)
#elif W == 8
#define KV_ORDER(i) (i)
#endif
#ifdef KV_ORDER
/* Scores as score_quad has them: each token's products are summed up in W lanes, over the depth, and these in the order of vf_sum4. Here
   a lane has a register, with W tokens. */
static inline __attribute__((always_inline)) void KV(multiply_rows_in_order)(
    const float *a, ptrdiff_t a_stride, const float *b, int depth, float *c, const int rows)
{
    vf four[W / 4][KV_QUAD];
#pragma GCC unroll 4
    for (int lot = 0; lot < W / 4; lot++) {
        const int first = 4 * (W == 16 ? KV_ORDER(lot) : lot);
        vf pair[2][KV_QUAD];
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
            const int low = first + KV_ORDER(2 * p), high = first + KV_ORDER(2 * p + 1);
            vf sum[2][KV_QUAD];
            KV_FOR4(r, rows, sum[0][r] = sum[1][r] = vf_set1(0.0f););
            for (int i = 0; i < depth; i += W) {
                const vf one = vf_load(b + (i + low) * KV_COLUMNS), other = vf_load(b + (i + high) * KV_COLUMNS);
                KV_FOR4(r, rows,
                    sum[0][r] = vf_fma(vf_set1(a[r * a_stride + i + low]), one, sum[0][r]);
                    sum[1][r] = vf_fma(vf_set1(a[r * a_stride + i + high]), other, sum[1][r]););
            }
            KV_FOR4(r, rows, pair[p][r] = vf_add(sum[0][r], sum[1][r]););
        }
        KV_FOR4(r, rows, four[lot][r] = vf_add(pair[0][r], pair[1][r]););
        if (W == 16 && lot % 2) KV_FOR4(r, rows, four[lot][r] = vf_add(four[lot - 1][r], four[lot][r]););
    }
    KV_FOR4(r, rows,
        const vf sum = vf_add(four[W / 8 - 1][r], four[W / 4 - 1][r]);
        vf_store(c + r * KV_TILE, sum););
}

static void KV(multiply_in_order)(const float *a, int rows, int depth, const float *b, float *c)
{
    for (int row = 0; row < rows; row += KV_QUAD)
        for (int column = 0; column < KV_COLUMNS; column += W) {
            const float *from = a + row * depth;
            float *to = c + row * KV_TILE + column;
            switch (rows - row) {
            case 1: KV(multiply_rows_in_order)(from, depth, b + column, depth, to, 1); break;
            case 2: KV(multiply_rows_in_order)(from, depth, b + column, depth, to, 2); break;
            case 3: KV(multiply_rows_in_order)(from, depth, b + column, depth, to, 3); break;
            default: KV(multiply_rows_in_order)(from, depth, b + column, depth, to, 4);
            }
        }
}
#endif

/* KV_LANES rows of n floats, as columns of a strip. */
static void KV(transpose_rows)(const float *rows, ptrdiff_t stride, int n, float *strip)
{
    for (int lane = 0; lane < KV_LANES; lane += W)
        for (int i = 0; i < n; i += W) {
            vf x[W], y[W];
            for (int t = 0; t < W; t++) x[t] = vf_load(rows + (lane + t) * stride + i);
            for (int step = 1; step < W; step *= 2) {
                for (int t = 0; t < W / 2; t++) {
                    y[2 * t] = vf_mix_low(x[t], x[t + W / 2]);
                    y[2 * t + 1] = vf_mix_high(x[t], x[t + W / 2]);
                }
                memcpy(x, y, sizeof x);
            }
            for (int t = 0; t < W; t++) vf_store(strip + (i + t) * KV_COLUMNS + lane, x[t]);
        }
}
