/* The rotation of rows: fixed signs, Hadamard's matrix within blocks of 2^a elements, Hartley's across the m blocks, and the signs
   again; and other matrices. */

/* out[i] = row[i] x factor x kv_signs[i]. */
static inline void KV(change_signs)(const float *row, float factor, ptrdiff_t n, float *out)
{
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) vf_store(out + i, vf_mul(vf_mul(vf_load(row + i), vf_set1(factor)), vf_load(kv_signs + i)));
    for (; i < n; i++) out[i] = row[i] * factor * kv_signs[i];
}

/* Sums and differences of elements `h` apart, in runs of 2 h. */
static inline void KV(butterflies)(float *row, ptrdiff_t n, ptrdiff_t h)
{
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

/* Multiplies each run of `size` = 2^a elements of a row by Sylvester's matrix. All tiers add in the same order. */
static inline void KV(hadamard)(float *row, ptrdiff_t n, ptrdiff_t size)
{
    ptrdiff_t h = size < W ? 1 : size < 4 * W ? W : 4 * W;
    if (h == 4 * W) { /* four vectors at a time hide each other's latency */
        for (ptrdiff_t i = 0; i < n; i += 4 * W) {
            vf x[4], y[4];
            KV_FOR4(v, 4, x[v] = KV(vf_hadamard)(vf_load(row + i + v * W)););
            y[0] = vf_add(x[0], x[1]), y[1] = vf_sub(x[0], x[1]), y[2] = vf_add(x[2], x[3]), y[3] = vf_sub(x[2], x[3]);
            x[0] = vf_add(y[0], y[2]), x[1] = vf_add(y[1], y[3]), x[2] = vf_sub(y[0], y[2]), x[3] = vf_sub(y[1], y[3]);
            KV_FOR4(v, 4, vf_store(row + i + v * W, x[v]););
        }
    } else if (h == W) {
        for (ptrdiff_t i = 0; i < n; i += W) vf_store(row + i, KV(vf_hadamard)(vf_load(row + i)));
    }
    for (; h < size; h *= 2) KV(butterflies)(row, n, h);
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
    for (; num_rows > 0; num_rows--, rows += stride, out += out_stride) {
        KV(change_signs)(rows, 1.0f / __builtin_sqrtf((float)size), n, out);
        KV(hadamard)(out, n, size);
        if (m > 1) KV(hartley)(out, m, size, cas);
        KV(change_signs)(out, 1.0f, n, out);
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
