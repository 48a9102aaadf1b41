/* The rotation of rows: Hadamard's matrix within blocks of 2^a elements, Hartley's across the m blocks; and other matrices. */

/* The first W rows of Sylvester's matrix, of W columns, times `norm`. */
static inline __attribute__((always_inline)) void KV(signs_of)(float norm, vf signs[W])
{
    signs[0] = vf_set1(norm); /* row j is the product of the rows of its bits */
    for (int j = 1; j < W; j++) signs[j] = vf_mul(signs[j & (j - 1)], vf_load(kv_hadamard[__builtin_ctz((unsigned)j)]));
}

/* Butterflies of four vectors. */
static inline __attribute__((always_inline)) void KV(butterfly4)(vf x[4])
{
    const vf a = vf_add(x[0], x[1]), b = vf_sub(x[0], x[1]), c = vf_add(x[2], x[3]), d = vf_sub(x[2], x[3]);
    x[0] = vf_add(a, c);
    x[1] = vf_add(b, d);
    x[2] = vf_sub(a, c);
    x[3] = vf_sub(b, d);
}

/* Transforms each 4 W elements of rows of n, a multiple of 4 W. Four sums at a time hide each other's latency. Where there
   are registers for eight, two quadruples run side by side, perhaps of two rows. */
static inline void KV(hadamard4)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n, float norm,
                                 float *out, ptrdiff_t out_stride)
{
    vf signs[W];
    KV(signs_of)(norm, signs);
    for (ptrdiff_t left = num_rows * (n / (4 * W)), c = 0; left > 0;) {
        const float *source[2] = {rows, rows};
        float *target[2] = {out, out};
        for (int k = 0; k < (W == 16 ? 2 : 1); k++) { /* a last quadruple without a partner runs twice */
            source[k] = left > 0 ? rows + c : source[0];
            target[k] = left > 0 ? out + c : target[0];
            left--;
            c += 4 * W;
            if (c == n) c = 0, rows += stride, out += out_stride;
        }
        const float *a = source[0], *b = source[1];
        vf x[4], y[4];
        KV_FOR4(v, 4, x[v] = vf_set1(0.0f); y[v] = x[v];);
        for (int j = 0; j < W; j++) {
            KV_FOR4(v, 4, x[v] = vf_fma(vf_set1(a[v * W + j]), signs[j], x[v]););
            if (W == 16) KV_FOR4(v, 4, y[v] = vf_fma(vf_set1(b[v * W + j]), signs[j], y[v]););
        }
        KV(butterfly4)(x);
        KV_FOR4(v, 4, vf_store(target[0] + v * W, x[v]););
        if (W != 16) continue;
        KV(butterfly4)(y);
        KV_FOR4(v, 4, vf_store(target[1] + v * W, y[v]););
    }
}

/* Multiplies each run of `size` = 2^a elements of a row by Sylvester's matrix times 1 / sqrt(size). If size is at least 4 W,
   hadamard4 has transformed each 4 W elements already. The first W x W of the matrix works inside the vectors, by sums of its
   rows; the rest is butterflies between whole vectors. */
static inline void KV(hadamard)(float *row, ptrdiff_t n, ptrdiff_t size)
{
    const float norm = 1.0f / __builtin_sqrtf((float)size);
    ptrdiff_t h = size < W ? 1 : size < 4 * W ? W : 4 * W;
    if (size < W) {
        for (ptrdiff_t i = 0; i < n; i++) row[i] *= norm;
    } else if (size < 4 * W) {
        vf signs[W];
        KV(signs_of)(norm, signs);
        for (ptrdiff_t i = 0; i < n; i += 4 * W) {
            const ptrdiff_t vectors = (n - i) / W;
            vf sum[4];
            KV_FOR4(v, 4, sum[v] = vf_set1(0.0f););
            for (int j = 0; j < W; j++) {
                const float *x = row + i + j;
                KV_FOR4(v, vectors, sum[v] = vf_fma(vf_set1(x[v * W]), signs[j], sum[v]););
            }
            KV_FOR4(v, vectors, vf_store(row + i + v * W, sum[v]););
        }
    }
    for (; h < size; h *= 2)
        for (ptrdiff_t i = 0; i < n; i += 2 * h) {
            float *a = row + i, *b = a + h;
            ptrdiff_t j = 0;
            for (; j + W <= h; j += W) {
                const vf x = vf_load(a + j), y = vf_load(b + j);
                vf_store(a + j, vf_add(x, y));
                vf_store(b + j, vf_sub(x, y));
            }
            for (; j < h; j++) {
                const float x = a[j], y = b[j];
                a[j] = x + y;
                b[j] = x - y;
            }
        }
}

/* Element h of block i becomes the sum over the blocks j of cas[i j mod m] times element h of block j. */
static inline void KV(hartley)(float *row, ptrdiff_t m, ptrdiff_t size, const float *cas)
{
    float out[KV_MAX_HEAD_DIM];
    for (ptrdiff_t i = 0; i < m; i++) {
        ptrdiff_t h = 0;
        for (; h + W <= size; h += W) {
            vf sum = vf_set1(0.0f);
            for (ptrdiff_t j = 0, k = 0; j < m; j++, k += i, k -= k < m ? 0 : m)
                sum = vf_fma(vf_load(row + j * size + h), vf_set1(cas[k]), sum);
            vf_store(out + i * size + h, sum);
        }
        for (; h < size; h++) {
            float sum = 0.0f;
            for (ptrdiff_t j = 0, k = 0; j < m; j++, k += i, k -= k < m ? 0 : m) sum += row[j * size + h] * cas[k];
            out[i * size + h] = sum;
        }
    }
    memcpy(row, out, (size_t)(m * size) * sizeof(float));
}

static void KV(rotate)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n, float *out,
                       ptrdiff_t out_stride)
{
    const ptrdiff_t size = n & -n, m = n / size;
    float cas[KV_MAX_HEAD_DIM];
    for (ptrdiff_t k = 0; k < m && m > 1; k++) { /* (cos + sin) / sqrt(m) */
        const double angle = 6.283185307179586 * (double)k / (double)m;
        cas[k] = (float)((cos(angle) + sin(angle)) / __builtin_sqrt((double)m));
    }
    if (size >= 4 * W) KV(hadamard4)(rows, stride, num_rows, n, 1.0f / __builtin_sqrtf((float)size), out, out_stride);
    for (; num_rows > 0; num_rows--, rows += stride, out += out_stride) {
        if (size < 4 * W && rows != out) memcpy(out, rows, (size_t)n * sizeof(float));
        KV(hadamard)(out, n, size);
        if (m > 1) KV(hartley)(out, m, size, cas);
    }
}

/* Four rows at a time share the loads of the matrix. A row gets the same bits whatever the others are. */
static void KV(change_basis)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n, const float *matrix,
                         float *out, ptrdiff_t out_stride)
{
    const ptrdiff_t padded = (n + KV_LANES - 1) / KV_LANES * KV_LANES;
    float x[4][KV_MAX_HEAD_DIM];
    KV_ALIGNED float y[4][KV_MAX_HEAD_DIM];
    for (; num_rows > 0; num_rows -= 4, rows += 4 * stride, out += 4 * out_stride) {
        const ptrdiff_t count = num_rows < 4 ? num_rows : 4;
        for (ptrdiff_t r = 0; r < 4; r++) memcpy(x[r], rows + (r < count ? r : 0) * stride, (size_t)n * sizeof(float));
        for (ptrdiff_t c = 0; c < padded; c += W) {
            vf sums[4];
            KV_FOR4(r, 4, sums[r] = vf_set1(0.0f););
            for (ptrdiff_t i = 0; i < n; i++) {
                const vf column = vf_load(matrix + i * padded + c);
                KV_FOR4(r, 4, sums[r] = vf_fma(vf_set1(x[r][i]), column, sums[r]););
            }
            KV_FOR4(r, 4, vf_store(y[r] + c, sums[r]););
        }
        for (ptrdiff_t r = 0; r < count; r++) memcpy(out + r * out_stride, y[r], (size_t)n * sizeof(float));
    }
}
