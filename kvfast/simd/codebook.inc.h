/* Codebooks: the nearest centroids of points, and attention on their indices. In what attention reads, `lanes` query
   rows (a multiple of W, at most KV_ROWS) lie together, so that one code serves all of them with whole vectors. */

/* Lanes are points. What is largest is x.c - |c|^2/2. Its running maximum over the centroids is kept, so that the first
   centroid at the maximum is as many centroids on as the running maximum was below it: no comparison keeps an index. */
static void KV(nearest)(const float *points, ptrdiff_t stride, ptrdiff_t n, const kv_book *book, const float *half_norms,
                        uint8_t *codes, float *distances)
{
    KV_ALIGNED float running[KV_MAX_CENTROIDS * W];
    KV_ALIGNED float index[W];
    for (ptrdiff_t t = 0; t < n; t += W) {
        vf most = vf_set1(-INFINITY);
        const float *centroid = book->centroids;
        for (int c = 0; c < book->count; c++, centroid += book->dim) {
            vf closeness = vf_set1(-half_norms[c]);
            for (int i = 0; i < book->dim; i++)
                closeness = vf_fma(vf_load(points + i * stride + t), vf_set1(centroid[i]), closeness);
            most = vf_max(closeness, most);
            vf_store(running + c * W, most);
        }
        vi first = vi_set1(0);
        for (int c = 0; c < book->count - 1; c++) first = vi_count_above(first, most, vf_load(running + c * W));
        vf_store(distances + t, vf_sub(vf_set1(0.0f), most));
        vf_store(index, vi_to_float(first));
        for (int i = 0; i < W; i++) codes[t + i] = (uint8_t)index[i];
    }
}

/* table (count, lanes): the product of each centroid with each row of queries (dim, lanes). */
static void KV(tabulate)(const kv_book *book, const float *queries, int lanes, float *table)
{
    for (int c = 0; c < book->count; c++)
        for (int r = 0; r < lanes; r += W) {
            vf sum = vf_set1(0.0f);
            for (int i = 0; i < book->dim; i++)
                sum = vf_fma(vf_load(queries + i * lanes + r), vf_set1(book->centroids[c * book->dim + i]), sum);
            vf_store(table + c * lanes + r, sum);
        }
}

/* Both nibbles of a byte hold codes, the low one the first, where `packed`. */
static inline int KV(code_at)(const uint8_t *codes, int j, int packed)
{
    return packed ? codes[j >> 1] >> (j & 1) * 4 & 15 : codes[j];
}

/* scores (n, lanes): the sum over the subvectors of what the table (subvectors, count, lanes) has for their codes. */
static inline __attribute__((always_inline)) void KV(lookup_as)(
    const kv_codes *codes, ptrdiff_t n, const float *table, int lanes, float *scores, const int packed)
{
    const ptrdiff_t step = (ptrdiff_t)codes->count * lanes;
    for (ptrdiff_t t = 0; t < n; t++) {
        const uint8_t *token = codes->data + t * codes->stride;
        for (int r = 0; r < lanes; r += W) {
            vf even = vf_set1(0.0f), odd = even;
            const float *row = table + r;
            int j = 0;
            for (; j + 2 <= codes->subvectors; j += 2, row += 2 * step) {
                even = vf_add(even, vf_load(row + KV(code_at)(token, j, packed) * lanes));
                odd = vf_add(odd, vf_load(row + step + KV(code_at)(token, j + 1, packed) * lanes));
            }
            if (j < codes->subvectors) even = vf_add(even, vf_load(row + KV(code_at)(token, j, packed) * lanes));
            vf_store(scores + t * lanes + r, vf_add(even, odd));
        }
    }
}

static void KV(lookup)(const kv_codes *codes, ptrdiff_t n, const float *table, int lanes, float *scores)
{
    if (codes->packed)
        KV(lookup_as)(codes, n, table, lanes, scores, 1);
    else
        KV(lookup_as)(codes, n, table, lanes, scores, 0);
}

/* Scores (n, lanes) become exp(score - m), m (lanes,) is the largest of each row and l (lanes,) the sum of its weights; a
   row that sees nothing, all of whose scores are -inf, gets weights of 0. */
static void KV(weigh)(float *scores, ptrdiff_t n, int lanes, float *m, float *l)
{
    for (int r = 0; r < lanes; r += W) {
        vf largest = vf_set1(-INFINITY), sum = vf_set1(0.0f);
        for (ptrdiff_t t = 0; t < n; t++) largest = vf_max(largest, vf_load(scores + t * lanes + r));
        vf_store(m + r, largest);
        const vf base = vf_max(largest, vf_set1(-3.4028235e38f));
        for (ptrdiff_t t = 0; t < n; t++) {
            const vf weight = KV(exp)(vf_sub(vf_load(scores + t * lanes + r), base));
            vf_store(scores + t * lanes + r, weight);
            sum = vf_add(sum, weight);
        }
        vf_store(l + r, sum);
    }
}

/* Adds the weights (n, lanes) of the tokens to the sums (subvectors, count, lanes) of their centroids. */
static inline __attribute__((always_inline)) void KV(scatter_as)(
    const kv_codes *codes, ptrdiff_t n, const float *weights, int lanes, float *sums, const int packed)
{
    const ptrdiff_t step = (ptrdiff_t)codes->count * lanes;
    for (ptrdiff_t t = 0; t < n; t++) {
        const uint8_t *token = codes->data + t * codes->stride;
        for (int r = 0; r < lanes; r += W) {
            const vf weight = vf_load(weights + t * lanes + r);
            float *row = sums + r;
            for (int j = 0; j < codes->subvectors; j++, row += step) {
                float *sum = row + KV(code_at)(token, j, packed) * lanes;
                vf_store(sum, vf_add(vf_load(sum), weight));
            }
        }
    }
}

static void KV(scatter)(const kv_codes *codes, ptrdiff_t n, const float *weights, int lanes, float *sums)
{
    if (codes->packed)
        KV(scatter_as)(codes, n, weights, lanes, sums, 1);
    else
        KV(scatter_as)(codes, n, weights, lanes, sums, 0);
}

/* out (dim, lanes): the centroids weighted by the sums (count, lanes). */
static void KV(combine)(const kv_book *book, const float *sums, int lanes, float *out)
{
    for (int i = 0; i < book->dim; i++)
        for (int r = 0; r < lanes; r += W) {
            vf sum = vf_set1(0.0f);
            for (int c = 0; c < book->count; c++)
                sum = vf_fma(vf_load(sums + c * lanes + r), vf_set1(book->centroids[c * book->dim + i]), sum);
            vf_store(out + i * lanes + r, sum);
        }
}
