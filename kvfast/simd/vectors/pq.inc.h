/* Product quantisation: finds the nearest centroids of points, and decodes codes to rows. */

/* Lanes are points. The nearest centroid has the largest x.c - |c|^2/2. The running maximum over the centroids is kept. The
   index of the first centroid at the maximum is the number of centroids at which the running maximum was still below it, so
   no comparison has to carry an index. */
static void KV(nearest)(const float *points, ptrdiff_t stride, ptrdiff_t n, const kv_pq_codebook *codebook, const float *half_norms,
                        uint8_t *codes, float *distances)
{
    KV_ALIGNED float running[KV_MAX_CENTROIDS * W];
    KV_ALIGNED float index[W];
    for (ptrdiff_t t = 0; t < n; t += W) {
        vf most = vf_set1(-INFINITY);
        const float *centroid = codebook->centroids;
        for (int c = 0; c < codebook->count; c++, centroid += codebook->dim) {
            vf closeness = vf_set1(-half_norms[c]);
            for (int i = 0; i < codebook->dim; i++)
                closeness = vf_fma(vf_load(points + i * stride + t), vf_set1(centroid[i]), closeness);
            most = vf_max(closeness, most);
            vf_store(running + c * W, most);
        }
        vi first = vi_set1(0);
        for (int c = 0; c < codebook->count - 1; c++) first = vi_count_above(first, most, vf_load(running + c * W));
        vf_store(distances + t, vf_sub(vf_set1(0.0f), most));
        vf_store(index, vi_to_float(first));
        for (int i = 0; i < W; i++) codes[t + i] = (uint8_t)index[i];
    }
}

/* Decodes codes to rows of float16, (n, dims), `stride` bytes apart. `width` and `count` are compile-time constants, the same
   for all subvectors, so that one load and one store copy a centroid. */
static inline __attribute__((always_inline)) void KV(decode_as)(const kv_codes *codes, ptrdiff_t n, char *rows,
                                                                ptrdiff_t stride, const int width, const int count)
{
    const size_t bytes = 2 * (size_t)width;
    const uint8_t *token = codes->data;
    const char *codebooks = (const char *)codes->centroids;
    const ptrdiff_t token_stride = codes->stride; /* local, so that the compiler knows that no row overwrites it */
    const int subvectors = codes->subvectors;
    for (; n > 0; n--, token += token_stride, rows += stride) {
        const char *codebook = codebooks;
        char *at = rows;
        int j = 0;
#pragma GCC unroll 4
        for (; j + 2 <= subvectors; j += 2, at += 2 * bytes, codebook += 2 * count * bytes) {
            const size_t both = token[j >> 1], first = count == 16 ? both & 15 : token[j];
            memcpy(at, codebook + first * bytes, bytes);
            memcpy(at + bytes, codebook + (count + (count == 16 ? both >> 4 : token[j + 1])) * bytes, bytes);
        }
        if (j < subvectors) memcpy(at, codebook + (count == 16 ? token[j >> 1] & 15 : token[j]) * bytes, bytes);
    }
}

/* The same for any number of centroids, and subvectors of different widths. */
static void KV(decode_any)(const kv_codes *codes, ptrdiff_t n, char *rows, ptrdiff_t stride)
{
    for (ptrdiff_t t = 0; t < n; t++) {
        const uint8_t *token = codes->data + t * codes->stride;
        for (int j = 0; j < codes->subvectors; j++) {
            const int first = codes->bounds[j], width = codes->bounds[j + 1] - first;
            const int code = codes->packed ? token[j >> 1] >> (j & 1) * 4 & 15 : token[j];
            memcpy(rows + t * stride + 2 * first, codes->centroids + first * codes->count + code * width, 2 * (size_t)width);
        }
    }
}

static void KV(decode_codes)(const kv_codes *codes, ptrdiff_t n, char *rows, ptrdiff_t stride)
{
#define KV_OF_WIDTHS(count)                                          \
    switch (codes->width) {                                          \
    case 2: KV(decode_as)(codes, n, rows, stride, 2, count); return; \
    case 4: KV(decode_as)(codes, n, rows, stride, 4, count); return; \
    case 8: KV(decode_as)(codes, n, rows, stride, 8, count); return; \
    }
    if (codes->count == 16) KV_OF_WIDTHS(16)
    if (codes->count == 256) KV_OF_WIDTHS(256)
#undef KV_OF_WIDTHS
    KV(decode_any)(codes, n, rows, stride);
}
