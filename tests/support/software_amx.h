/* The instructions of Intel's matrix unit (AMX) in plain C, so that the kernels for it can be tested where there is none:
   ci/software_tiers.sh includes this file before those of kvfast that know of the unit. Intel's Intrinsics Guide says what each of them does. */
#if defined(__x86_64__) && !defined(SOFTWARE_AMX_H)
#define SOFTWARE_AMX_H
#define KV_SOFTWARE_AMX 1
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static __thread struct {
    int rows[8], bytes[8]; /* 0 until a configuration is loaded: a use before that would be an illegal instruction */
    union {
        int32_t sums[16][16];
        float floats[16][16];
        int8_t codes[16][64];
        uint8_t unsigned_codes[16][64];
        uint16_t halves[16][32];
    } tile[8];
} software_amx;

static inline void software_amx_check(int tile)
{
    if (!software_amx.rows[tile]) abort();
}

static inline void software_amx_configure(const void *config)
{
    const uint8_t *at = config;
    if (at[0] != 1) abort();
    memset(&software_amx, 0, sizeof software_amx);
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, at + 16 + 2 * i, 2);
        software_amx.bytes[i] = bytes, software_amx.rows[i] = at[48 + i];
        if (bytes > 64 || at[48 + i] > 16) abort();
    }
}

static inline void software_amx_release(void) { memset(&software_amx, 0, sizeof software_amx); }

static inline void software_amx_zero(int tile)
{
    software_amx_check(tile);
    memset(software_amx.tile[tile].codes, 0, 1024);
}

static inline void software_amx_load(int tile, const void *base, intptr_t stride)
{
    software_amx_zero(tile);
    for (int row = 0; row < software_amx.rows[tile]; row++)
        memcpy(software_amx.tile[tile].codes[row], (const char *)base + row * stride, (size_t)software_amx.bytes[tile]);
}

static inline void software_amx_store(int tile, void *base, intptr_t stride)
{
    software_amx_check(tile);
    for (int row = 0; row < software_amx.rows[tile]; row++)
        memcpy((char *)base + row * stride, software_amx.tile[tile].codes[row], (size_t)software_amx.bytes[tile]);
}

/* The shapes of the three tiles of a product must fit, or the processor refuses. */
static inline void software_amx_shapes(int sums, int a, int b)
{
    software_amx_check(sums), software_amx_check(a), software_amx_check(b);
    if (software_amx.rows[sums] != software_amx.rows[a] || software_amx.bytes[a] != 4 * software_amx.rows[b] ||
        software_amx.bytes[sums] != software_amx.bytes[b]) abort();
}

#define SOFTWARE_AMX_PRODUCT(name, a_codes, b_codes)                                                               \
    static inline void software_amx_##name(int sums, int a, int b)                                                 \
    {                                                                                                              \
        software_amx_shapes(sums, a, b);                                                                           \
        for (int m = 0; m < software_amx.rows[sums]; m++)                                                          \
            for (int k = 0; k < software_amx.bytes[a] / 4; k++)                                                    \
                for (int n = 0; n < software_amx.bytes[sums] / 4; n++)                                             \
                    for (int i = 0; i < 4; i++)                                                                    \
                        software_amx.tile[sums].sums[m][n] +=                                                      \
                            software_amx.tile[a].a_codes[m][4 * k + i] * software_amx.tile[b].b_codes[k][4 * n + i]; \
    }
SOFTWARE_AMX_PRODUCT(dpbssd, codes, codes)
SOFTWARE_AMX_PRODUCT(dpbsud, codes, unsigned_codes)

static inline float software_amx_half(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void software_amx_dpbf16ps(int sums, int a, int b)
{
    software_amx_shapes(sums, a, b);
    for (int m = 0; m < software_amx.rows[sums]; m++)
        for (int k = 0; k < software_amx.bytes[a] / 4; k++)
            for (int n = 0; n < software_amx.bytes[sums] / 4; n++)
                for (int i = 0; i < 2; i++)
                    software_amx.tile[sums].floats[m][n] +=
                        software_amx_half(software_amx.tile[a].halves[m][2 * k + i]) *
                        software_amx_half(software_amx.tile[b].halves[k][2 * n + i]);
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig software_amx_configure
#define _tile_release software_amx_release
#define _tile_zero software_amx_zero
#define _tile_loadd software_amx_load
#define _tile_stored software_amx_store
#define _tile_dpbssd software_amx_dpbssd
#define _tile_dpbsud software_amx_dpbsud
#define _tile_dpbf16ps software_amx_dpbf16ps
#endif
