/* Measures the machine: reads memory as the kernels do, and runs their arithmetic in registers alone. */

static uint32_t KV(read_bytes)(const char *source, ptrdiff_t n)
{
    vi a = vi_set1(0), b = a, c = a, d = a;
    for (const char *end = source + n; source < end; source += 256) {
        for (int line = 0; line < 256; line += 64) kv_prefetch(source + 1024 + line);
        for (int i = 0; i < 256; i += 16 * W) {
            a = vi_add(a, vf_bits(vf_load((const float *)(source + i))));
            b = vi_add(b, vf_bits(vf_load((const float *)(source + i + 4 * W))));
            c = vi_add(c, vf_bits(vf_load((const float *)(source + i + 8 * W))));
            d = vi_add(d, vf_bits(vf_load((const float *)(source + i + 12 * W))));
        }
    }
    return (uint32_t)vi_hsum(vi_add(vi_add(a, b), vi_add(c, d)));
}

#ifdef vpair
typedef vpair KV(measured);
#define KV_MEASURED(codes) vpair_of(codes, codes)
#define KV_MEASURE(a, b, codes, x) vpair_dot(a, b, codes, x)
#else
typedef vwide KV(measured);
#define KV_MEASURED(codes) vcodes_widen(codes)
#define KV_MEASURE(a, b, codes, x) vacc_dot(a, b, codes, x)
#endif

/* Multiplies `steps` times as a quad of dot_quad does, without its loads of codes; returns the number of multiplications
   and additions. The operands change from step to step and depend on `sink`, which is 0: otherwise the compiler would
   multiply once or not at all. */
static double KV(multiply_int8)(ptrdiff_t steps, float *sink)
{
    enum { CODES = 8 };
    int8_t x[16 * KV_QUAD];
    KV_ALIGNED uint8_t bytes[4 * W];
    KV(measured) codes[CODES];
    vacc a[KV_QUAD][4], b[KV_QUAD][4];
    for (int i = 0; i < 16 * KV_QUAD; i++) x[i] = (int8_t)((float)(i + 1) + *sink);
    for (int i = 0; i < CODES; i++) {
        for (int j = 0; j < 4 * W; j++) bytes[j] = (uint8_t)((float)(i + j) + *sink);
        codes[i] = KV_MEASURED(vcodes_load(bytes));
    }
    KV_FOR4(r, KV_QUAD, KV_FOR4(v, INT_VECTORS, a[r][v] = b[r][v] = (vacc)vi_set1(0);););
    for (ptrdiff_t i = 0; i < steps; i++)
        KV_FOR4(v, INT_VECTORS,
            const KV(measured) now = codes[(size_t)(i + v) % CODES];
            KV_FOR4(r, KV_QUAD, KV_MEASURE(a[r][v], b[r][v], now, x + 8 * r);););
    vi total = vi_set1(0);
    KV_FOR4(r, KV_QUAD, KV_FOR4(v, INT_VECTORS, total = vi_add(total, KV_TOTAL(a[r][v], b[r][v]));););
    *sink = (float)vi_hsum(total);
    return 2.0 * (double)steps * (KV_QUAD * INT_VECTORS * W * INT_PRODUCTS);
}

/* The same for float32. Each sum is a factor of the next one, for the same reason; from different starts all of them
   approach 2. */
static double KV(multiply_float32)(ptrdiff_t steps, float *sink)
{
    const vf half = vf_set1(0.5f), one = vf_set1(1.0f);
    vf a[KV_QUAD][4];
    KV_FOR4(r, KV_QUAD, KV_FOR4(v, 3, a[r][v] = vf_set1((float)(3 * r + v) + *sink););); /* 12: what hides the latency, and fits */
    for (ptrdiff_t i = 0; i < steps; i++) KV_FOR4(r, KV_QUAD, KV_FOR4(v, 3, a[r][v] = vf_fma(a[r][v], half, one);););
    vf total = vf_set1(0.0f);
    KV_FOR4(r, KV_QUAD, KV_FOR4(v, 3, total = vf_add(total, a[r][v]);););
    *sink = vf_hsum(total);
    return 2.0 * (double)steps * (KV_QUAD * 3 * W);
}
