/* The rotation of rows: Hadamard's matrix within blocks of 2^a elements, Hartley's across the m blocks. */

/* Sylvester's matrix times 1 / sqrt(size) on each of `blocks` runs of `size` = 2^a elements. Its first W x W
   works inside the vectors, by sums of its rows; the rest is butterflies between whole vectors. */
static inline void KV(hadamard)(float *row, ptrdiff_t n, ptrdiff_t size)
{
    const float norm = 1.0f / __builtin_sqrtf((float)size);
    ptrdiff_t h = size < W ? 1 : W;
    if (size < W) {
        for (ptrdiff_t i = 0; i < n; i++) row[i] *= norm;
    } else {
        vf signs[W]; /* row j is the product of the rows of its bits */
        signs[0] = vf_set1(norm);
        for (int j = 1; j < W; j++)
            signs[j] = vf_mul(signs[j & (j - 1)], vf_load(kv_hadamard[__builtin_ctz((unsigned)j)]));
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

/* Element h of every block becomes the sums over the blocks j of cas[i j mod m] times theirs. */
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

static void KV(rotate)(float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n)
{
    const ptrdiff_t size = n & -n, m = n / size;
    float cas[KV_MAX_HEAD_DIM];
    for (ptrdiff_t k = 0; k < m && m > 1; k++) { /* (cos + sin) / sqrt(m) */
        const double turn = 6.283185307179586 * (double)k / (double)m;
        cas[k] = (float)((cos(turn) + sin(turn)) / __builtin_sqrt((double)m));
    }
    for (; num_rows > 0; num_rows--, rows += stride) {
        KV(hadamard)(rows, n, size);
        if (m > 1) KV(hartley)(rows, m, size, cas);
    }
}
