/* Holds the kernels of a build to what another build has recorded: `kernel_vectors FILE`, linked with kvfast/simd, for each tier that the
   processor can run. kernel_vectors.py records the file with the kernels of an installed kvfast. So a compiler, a system or a processor
   that has no Python is tried, too.

   The same tier must give the same bits, whatever compiled it: all rounding is in the source. Only `rotate` asks the system for a sine.
   A tier that is not in the file is held to the last one there, the scalar tier, within the bound of each result.
   The kernels of panels, which only AVX-512 VNNI and AMX have, are not called.

   On Windows, also that a kernel leaves the registers xmm6 to xmm15 as they were, which other systems let it overwrite, and takes any
   stack that Windows allows. */
#include "simd/platform.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32, BLOCKS = 2, COUNT = 45, ROWS = 5, MOST_DIM = 48, NUM_VALUES = BLOCK * BLOCKS * MOST_DIM + 512 };
/* How far a result of one tier may be from that of another: */
#define BITS 0.0      /* the same bits */
#define OWN -1.0      /* nothing in common */
#define CODES 2e-3    /* part of the bytes that differ: codes of values halfway between two */
#define NEAR 1e-6     /* of floats, next to the largest of them: sums of a row */
#define ATTENTION 3e-4 /* the same of what goes through codes, see test_tiers_agree */
#define SEARCHED 0.1   /* the same where a tier may find another scale, or give another line more bits, that is as good */

typedef struct {
    const kv_kernels *kernels;
    FILE *out;            /* records, or NULL: */
    const char *at, *end; /* what is recorded */
    int same_tier, results, failures;
} vectors;

static float values[NUM_VALUES];  /* the rows of all cases */
static KV_ALIGNED kv_room room;
static KV_ALIGNED kv_queries queries;
static KV_ALIGNED kv_softmax state;
static KV_ALIGNED char blocks[BLOCKS * BLOCK * (MOST_DIM * 4 + 16)], copy[BLOCK * (MOST_DIM * 4 + 64)];
static KV_ALIGNED float acc[KV_ROWS * KV_MAX_HEAD_DIM], out[NUM_VALUES];

/* Whether a result is another than the recorded one. 'f': floats, 's': floats that depend on the system's sine, 'b': bytes. */
static int differing(const vectors *v, char kind, const void *got, const char *want, size_t bytes, double bound)
{
    if (v->same_tier ? kind != 's' : bound == BITS) return memcmp(got, want, bytes) != 0;
    if (bound == OWN) return 0;
    if (kind == 'b') {
        size_t others = 0;
        for (size_t i = 0; i < bytes; i++) others += ((const char *)got)[i] != want[i];
        return (double)others > bound * (double)bytes;
    }
    double largest = 0, error = 0;
    for (size_t i = 0; i < bytes / 4; i++) {
        float a, b;
        memcpy(&a, (const char *)got + 4 * i, 4), memcpy(&b, want + 4 * i, 4);
        if (fabs(b) > largest) largest = fabs(b);
        if (!(fabs((double)a - b) <= error)) error = fabs((double)a - b);
    }
    return !(error <= bound * largest);
}

static void result(vectors *v, const char *name, char kind, const void *data, size_t bytes, double bound)
{
    char head[64] = {0};
    const char *wrong = NULL;
    snprintf(head, sizeof head, "%c %s %u", kind, name, (unsigned)bytes);
    v->results++;
    if (v->out) {
        if (fwrite(head, sizeof head, 1, v->out) != 1 || fwrite(data, 1, bytes, v->out) != bytes) wrong = "cannot be written";
    } else if ((size_t)(v->end - v->at) < sizeof head + bytes || memcmp(v->at, head, sizeof head)) {
        wrong = "is not what was recorded next", v->at = v->end;
    } else {
        if (differing(v, kind, data, v->at + sizeof head, bytes, bound)) wrong = "differs";
        v->at += sizeof head + bytes;
    }
    if (wrong && v->failures++ < 10) printf("%s: result %d, %s: %s\n", v->kernels->isa, v->results, name, wrong);
}

static void floats(vectors *v, const char *name, const float *data, ptrdiff_t n, double bound)
{
    result(v, name, 'f', data, (size_t)n * sizeof(float), bound);
}

static void number(vectors *v, const char *name, double value, double bound)
{
    const float as_float = (float)value;
    floats(v, name, &as_float, 1, bound);
}

/* Rows with the spread of sums of uniform numbers, and one loud element in 16. Integers alone make them. */
static void fill_values(void)
{
    uint32_t random = 1;
    for (int i = 0; i < NUM_VALUES; i++) {
        int32_t sum = 0;
        for (int j = 0; j < 4; j++) random = random * 1664525u + 1013904223u, sum += (int32_t)(random >> 12) - (1 << 19);
        values[i] = (float)sum * (i % 16 == 3 ? 0x1p-17f : 0x1p-20f);
    }
}

static void of_floats(vectors *v)
{
    static const char *const names[3] = {"float32", "float16", "bfloat16"};
    static const float odd[] = {0, -0.0f, 1e-7f, 6.1e-5f, -5.96e-8f, 65504, 1, 0x1.002p0f, 0x1.006p0f, 3e-39f, -65519, 1.5f, 7e-5f};
    float row[64];
    floats(v, "inputs", values, 256, BITS);
    for (int i = 0; i < 64; i++) row[i] = i < (int)(sizeof odd / sizeof *odd) ? odd[i] : values[i];
    for (int dtype = 0; dtype < 3; dtype++) {
        v->kernels->from_float[dtype](row, 61, copy);
        result(v, names[dtype], 'b', copy, (size_t)(61 * kv_dtypes[dtype].bits / 8), BITS);
        v->kernels->to_float[dtype](copy, 61, out);
        floats(v, "to_float", out, 61, BITS);
    }
    number(v, "find_unstorable", (double)v->kernels->find_unstorable(row, 64, 60000), BITS);
    number(v, "find_unstorable none", (double)v->kernels->find_unstorable(row, 64, 65535), BITS);
    number(v, "quantize", v->kernels->quantize(values, 61, 127, (int8_t *)copy), BITS);
    result(v, "quantize codes", 'b', copy, 61, BITS);
    v->kernels->dequantize((const int8_t *)copy, 61, 0.37f, out);
    floats(v, "dequantize", out, 61, BITS);
    v->kernels->scale_add(out, 0.3f, values, 1.7f, 61);
    floats(v, "scale_add", out, 61, NEAR);
    double folded[61];
    for (int i = 0; i < 61; i++) folded[i] = out[i];
    v->kernels->scale_add_double(folded, 0.3, values, 1.7, 61);
    for (int i = 0; i < 61; i++) out[i] = (float)folded[i];
    floats(v, "scale_add_double", out, 61, NEAR);
    v->kernels->store_nontemporal(values, 61, acc);
    v->kernels->store_nontemporal(NULL, 0, NULL);
    floats(v, "store_nontemporal", acc, 61, BITS);
}

static void of_rows(vectors *v)
{
    static const int dims[] = {48, 40, 32, 21, 1};
    for (int i = 0; i < 5; i++) {
        v->kernels->rotate(values, MOST_DIM, 6, dims[i], out, MOST_DIM);
        for (int row = 0; row < 6; row++) result(v, "rotate", 's', out + row * MOST_DIM, (size_t)dims[i] * 4, NEAR);
    }
    v->kernels->change_basis(values, MOST_DIM, 6, 21, values + 512, out, 21);
    floats(v, "change_basis", out, 6 * 21, NEAR);
    for (int kind = 0; kind < 4; kind++) {
        const kv_transform transform = {kind & 1 ? values + 700 : NULL, 1e-5f, values + 800, values + 900, 13, kind >> 1};
        v->kernels->transform(values, 61, 6, 61, &transform, out, 61);
        floats(v, "transform", out, 6 * 61, NEAR);
    }
}

static void of_products(vectors *v)
{
    static const int bounds[] = {0, 4, 8, 12, 16}, uneven[] = {0, 3, 8, 11, 16};
    const kv_pq_codebook book = {values, 16, 4};
    float half_norms[16];
    for (int i = 0; i < 16; i++) half_norms[i] = values[i] * values[i];
    v->kernels->nearest(values + 64, 32, 32, &book, half_norms, (uint8_t *)copy, out);
    result(v, "nearest", 'b', copy, 32, CODES);
    floats(v, "nearest distances", out, 32, NEAR);
    for (int packed = 0; packed < 2; packed++) {
        const kv_codes even = {(uint8_t *)copy, 3, 4, 16, 1, 4, bounds, (const uint16_t *)values};
        const kv_codes odd = {(uint8_t *)copy, 4, 4, 16, packed, 0, uneven, (const uint16_t *)values};
        for (int i = 0; i < 64; i++) copy[i] = (char)(packed ? i * 29 : i % 16);
        v->kernels->decode_codes(packed ? &even : &odd, 7, (char *)out, 32);
        result(v, "decode_codes", 'b', out, 7 * 32, BITS);
    }
    v->kernels->decode_codes(&(kv_codes){(uint8_t *)copy, 4, 4, 16, 1, 0, uneven, (const uint16_t *)values}, 7, (char *)out, 32);
    result(v, "decode_codes", 'b', out, 7 * 32, BITS);
}

static void of_machine(vectors *v)
{
    float sink[2] = {0, 0};
    number(v, "read_bytes", v->kernels->read_bytes((const char *)values, 4096), BITS);
    for (int kind = 0; kind < 2; kind++) {
        number(v, "multiply", v->kernels->multiply[kind](100, &sink[kind]), OWN);
        number(v, "multiply sum", sink[kind], OWN);
    }
}

typedef struct { int dtype, gaussian, means, channels, clip_search; } format;
static const format formats[] = {
    {KV_FLOAT32, 0, 0, 0, 0}, {KV_FLOAT16, 0, 0, 0, 0}, {KV_BFLOAT16, 0, 0, 0, 0}, {KV_INT8, 0, 0, 0, 0}, {KV_INT8, 0, 1, 0, 0},
    {KV_INT4, 0, 0, 0, 0}, {KV_INT4, 0, 0, 0, 1}, {KV_INT4, 0, 1, 0, 0}, {KV_INT4, 0, 1, 1, 0}, {KV_GAUSS4, 1, 0, 0, 0},
    {KV_GAUSS4, 1, 0, 0, 1}, {KV_GAUSS4, 1, 1, 0, 0}, {KV_INT2, 0, 0, 0, 0}, {KV_INT2, 1, 0, 0, 0}, {KV_INT3, 0, 0, 0, 0},
    {KV_INT3, 1, 0, 0, 0}, {KV_INT3, 0, 1, 1, 0}, {KV_INT5, 0, 0, 0, 0}, {KV_INT5, 1, 0, 0, 0}, {KV_INT6, 0, 0, 0, 0},
    {KV_INT7, 0, 0, 0, 0},
};

static int searches(const format *f) { return f->channels || f->clip_search || kv_dtypes[f->dtype].family == KV_PACKED_CODES; }

static ptrdiff_t whole_lines(ptrdiff_t bytes) { return (bytes + 63) / 64 * 64; }

/* As init_side of kvfast/codec/blocks.pyx. */
static kv_side side_of(const format *f, int head_dim, int block_size)
{
    const kv_dtype *dtype = &kv_dtypes[f->dtype];
    const int padded = (head_dim + KV_LANES - 1) / KV_LANES * KV_LANES;
    kv_side side = {.dtype = f->dtype, .family = dtype->family, .block_size = block_size, .head_dim = head_dim, .padded_dim = padded,
                    .gaussian = f->gaussian, .clip_search = f->clip_search};
    if (dtype->family == KV_FLOAT_ROWS) {
        side.row_stride = padded * dtype->bits / 8;
        side.bytes = block_size * side.row_stride;
        return side;
    }
    side.scales = block_size * padded / 8 * dtype->bits;
    side.scale_bytes = f->channels ? 0 : dtype->scale_bytes;
    side.bytes = whole_lines(side.scales + block_size * side.scale_bytes);
    if (f->means) side.means = side.bytes, side.bytes += whole_lines(2 * padded);
    if (f->channels) side.channels = side.bytes, side.bytes += whole_lines(2 * padded);
    return side;
}

/* Encodes BLOCKS blocks of one side, and reads them by all kernels but those of attention. */
static void of_codes(vectors *v, const format *f, int dim, int as_values, const float *rows)
{
    const kv_kernels *k = v->kernels;
    const kv_side side = side_of(f, dim, BLOCK), small = side_of(f, dim, KV_LANES);
    memset(blocks, 0, sizeof blocks);
    for (int i = 0; i < BLOCKS; i++, rows += BLOCK * dim) {
        char *block = blocks + i * side.bytes;
        if (f->means) {
            number(v, "seal_k", k->seal_k(&side, block, rows, dim, 0, &room), BITS);
            number(v, "seal_k again", k->seal_k(&side, block, rows, dim, 16, &room), BITS);
            continue;
        }
        (as_values ? k->encode_v : k->encode_k)(&side, block, 0, rows, dim, 5);
        (as_values ? k->encode_v : k->encode_k)(&side, block, 5, rows + 5 * dim, dim, BLOCK - 5);
    }
    result(v, as_values ? "values" : "keys", 'b', blocks, (size_t)(BLOCKS * side.bytes), searches(f) ? OWN : CODES);
    for (int t = 0; t < BLOCK; t++) (as_values ? k->decode_v : k->decode_k)(&side, blocks, t, out + t * dim);
    result(v, "decode", 'b', out, (size_t)(BLOCK * dim) * sizeof(float), searches(f) ? OWN : 4 * CODES);
    memset(copy, 0, sizeof copy);
    k->copy_run(&side, blocks, KV_LANES, &small, copy, as_values);
    if (!f->channels) k->copy_token(&side, blocks, 3, &small, copy, 7, as_values);
    result(v, "copies", 'b', copy, (size_t)small.bytes, searches(f) ? OWN : CODES);
}

static void of_attention(vectors *v, const format *f, int dim, int number_of_format)
{
    const kv_kernels *k = v->kernels;
    const kv_side side = side_of(f, dim, BLOCK);
    const double bound = searches(f) ? SEARCHED : ATTENTION;
    static const int from[ROWS] = {0, 3, 17, 40, 45}, to[ROWS] = {45, 45, 33, 41, 45};
    static float most[KV_ROWS], slopes[ROWS] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f}, bias[KV_ROWS * KV_TILE], rest[2 * KV_ROWS * KV_MAX_HEAD_DIM];
    static float rows[ROWS * MOST_DIM];
    static const int64_t query_at[ROWS] = {100, 101, 102, 103, 104};
    const kv_score_options options = {number_of_format % 4 == 1 ? 3.0f : 0, number_of_format % 4 == 2 ? slopes : NULL, query_at,
                                      number_of_format % 4 == 3 ? bias : NULL};
    kv_tile tile = {blocks, {0, side.bytes}, 0, COUNT};
    const kv_prefetch line = {tile.base, tile.at, 0, 64, 64, 0, 0};
    const kv_ahead ahead = {line, line, 0};

    of_codes(v, f, dim, 0, values);
    memset(rows, 0, sizeof rows);
    for (int r = 0; r < ROWS; r++) memcpy(rows + r * side.padded_dim, values + 2000 + r * dim, (size_t)dim * sizeof(float));
    for (int r = 0; r < KV_ROWS; r++) most[r] = -INFINITY, state.m[r] = -INFINITY, state.l[r] = state.noise[r] = 0;
    for (int i = 0; i < KV_ROWS * KV_TILE; i++) bias[i] = values[i % NUM_VALUES];
    queries.most = most, queries.room = state.room = &room, state.refined = 0;
    k->prepare[f->dtype](&side, rows, ROWS, 0.35f, &queries);
    k->scores[f->dtype](&side, &queries, ROWS, &tile, &ahead, state.weights);
    for (int r = 0; r < ROWS; r++) floats(v, "scores", state.weights + r * KV_TILE, COUNT, bound);
    k->softmax(&state, ROWS, COUNT, from, to, 7, &options);
    for (int r = 0; r < ROWS; r++) {
        floats(v, "weights", state.weights + r * KV_TILE, COUNT, bound);
        number(v, "largest", state.m[r] > -INFINITY ? state.m[r] : 0, bound);
        number(v, "sum", state.l[r], bound);
    }
    memset(acc, 0, sizeof acc);
    memset(rest, 0, sizeof rest);
    state.rest = dim == MOST_DIM ? rest : NULL;
    if (!f->means) {
        k->accumulate_latent[side.dtype](&side, &state, ROWS, &tile, &ahead, acc);
        floats(v, "accumulate_latent", acc, ROWS * side.padded_dim, bound);
        of_codes(v, f, dim, 1, values + 300);
        memset(acc, 0, sizeof acc);
        memset(rest, 0, sizeof rest);
        k->accumulate[f->dtype](&side, &state, ROWS, &tile, &ahead, acc);
        floats(v, "accumulate", acc, ROWS * side.padded_dim, bound);
    }
    number(v, "rows_to_refine", k->rows_to_refine(acc, side.padded_dim, KV_LANES, side.padded_dim, state.noise, ROWS), OWN);
}

static void of_formats(vectors *v)
{
    for (int i = 0; i < (int)(sizeof formats / sizeof *formats); i++) of_attention(v, &formats[i], i % 3 ? MOST_DIM : 21, i);
}

static void (*const cases[])(vectors *) = {of_floats, of_rows, of_products, of_machine, of_formats};

#if defined(_WIN32) && defined(__x86_64__)
enum { STACKS = 4 };
/* Calls a function with patterns in xmm6 to xmm15. Returns whether they are there afterwards. Callers align the stack to 16 bytes only: it
   is 16 x `stack` bytes below a cache line, as code that takes more for granted fails in some of the four cases. */
static int keeps_registers(void (*call)(vectors *), vectors *v, int stack)
{
    uint32_t before[40], after[40] = {0};
    int64_t below = 64 + 16 * stack; /* with 32 bytes for the function */
    for (uint32_t i = 0; i < 40; i++) before[i] = 0x9E3779B9u * (i + 1);
#define KV_MOVE(x) x(6, 0) x(7, 16) x(8, 32) x(9, 48) x(10, 64) x(11, 80) x(12, 96) x(13, 112) x(14, 128) x(15, 144)
#define KV_INTO(n, at) "movups " #at "(%%rsi), %%xmm" #n "\n\t"
#define KV_OUT_OF(n, at) "movups %%xmm" #n ", " #at "(%%rdi)\n\t"
    __asm__ volatile("movq %%rsp, %%rbx\n\tandq $-64, %%rsp\n\tsubq %%rdx, %%rsp\n\t" KV_MOVE(KV_INTO) "callq *%%rax\n\t" KV_MOVE(KV_OUT_OF)
                     "movq %%rbx, %%rsp"
                     : "+a"(call), "+c"(v), "+d"(below)
                     : "S"(before), "D"(after)
                     : "rbx", "r8", "r9", "r10", "r11", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
    return memcmp(before, after, sizeof before) == 0;
}

/* What must be noticed: a function that leaves xmm9 changed, which no compiler sees. */
__asm__(".globl spoils_a_register\nspoils_a_register:\n\txorps %xmm9, %xmm9\n\tret\n");
void spoils_a_register(vectors *v);
#else
enum { STACKS = 1 };
static int keeps_registers(void (*call)(vectors *), vectors *v, int stack) { return call(v), (void)stack, 1; }
#endif

static void run(vectors *v, int stack)
{
    fill_values();
    v->results = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!keeps_registers(cases[i], v, stack))
            printf("%s: case %u spoils xmm6 to xmm15\n", v->kernels->isa, (unsigned)i), v->failures++;
}

/* Appends the results of a tier to a file: its name, their bytes and they themselves. 0 on success. */
__attribute__((visibility("default"))) int record_vectors(const kv_kernels *kernels, const char *path)
{
    vectors v = {.kernels = kernels, .out = fopen(path, "ab")};
    char head[64] = {0};
    if (!v.out) return 1;
    snprintf(head, sizeof head, "tier %s", kernels->isa);
    v.failures = fwrite(head, sizeof head, 1, v.out) != 1;
    run(&v, 0);
    return v.failures + (fclose(v.out) != 0);
}

/* Holds a tier to the results of a file. Returns the number of failures. */
__attribute__((visibility("default"))) int hold_vectors(const kv_kernels *kernels, const char *path)
{
    FILE *file = fopen(path, "rb");
    char *data = malloc(1 << 24), name[64] = {0};
    if (!file || !data) return printf("cannot read %s\n", path), 1;
    vectors v = {.kernels = kernels, .end = data + fread(data, 1, 1 << 24, file)};
    fclose(file);
    snprintf(name, sizeof name, "tier %s", kernels->isa);
    for (const char *at = data; at + sizeof name <= v.end;) { /* heads tell how many bytes follow */
        if (!memcmp(at, "tier ", 5) && !v.same_tier) v.at = at + sizeof name, v.same_tier = !memcmp(at, name, sizeof name);
        at += sizeof name + (memcmp(at, "tier ", 5) ? strtoul(strrchr(at, ' '), NULL, 10) : 0);
    }
    if (!v.at) return printf("%s has no results\n", path), 1;
    const char *const first = v.at;
    for (int stack = 0; stack < STACKS; stack++) v.at = first, run(&v, stack);
    printf("%s: %d results, %s: %d failures\n", kernels->isa, v.results, v.same_tier ? "to the bit" : "within the bounds", v.failures);
    free(data);
    return v.failures;
}

#ifndef KV_NO_MAIN
int main(int argc, char **argv)
{
    int failures = argc != 2, tiers = 0;
    if (failures) return printf("usage: kernel_vectors FILE\n"), 2;
#if defined(_WIN32) && defined(__x86_64__)
    if (keeps_registers(spoils_a_register, NULL, 0)) return printf("a changed register is not noticed\n"), 2;
#endif
    kv_begin();
    for (const kv_kernels *const *tier = kv_all_kernels; *tier; tier++)
        if (kv_supported(*tier)) failures += hold_vectors(*tier, argv[1]), tiers++;
    printf("%d tiers, %d failures\n", tiers, failures);
    return failures != 0;
}
#endif
