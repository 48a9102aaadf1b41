/* Keys of INT3 and INT4 with channel scales. Their codes are evenly spaced. Lines of four depths have few or many bits, the same
   for all tokens of a block: with b bits in the mean, a quarter of the lines ("wide") has b + 1, a quarter ("narrow") b - 1. In INT4
   some of these have two bits more and two fewer. INT4 is read as the high bits of codes of 8 bits, INT3 of 4: channels with few
   bits then need no larger scales, so the rounding error of queries stays the same.

   Four lines of 64 codes, at [token % 16][depth % 4], are a unit of 32 x b bytes: one wide line, two even ones, one narrow line.
   Shifts and masks read them:

     INT4   64 bytes: an even line in the high nibble, the other in the low one
            64 bytes: the wide line in the 5 or 6 high bits, the narrow one in the others
     INT3   64 bytes: an even line in bits 0 to 2, the other in bits 3 to 5, the narrow one in bits 6 and 7
            32 bytes: the first 32 bytes of the wide line in the low nibble, the others in the high one */
#ifndef KVFAST_KEYS_H
#define KVFAST_KEYS_H

#include "packed.h"

/* Bits of the codes as they are read, and their middle. */
#define KV_KEY_BITS(mean) ((mean) == 4 ? 8 : 4)
#define KV_KEY_BIAS(dtype) (1 << (KV_KEY_BITS(kv_dtypes[dtype].bits) - 1))

/* The lines in the order of their bits: the wide ones, the even ones, the narrow ones. Unit u has the lines `wide`[u], `even`[2 u],
   `even`[2 u + 1] and `narrow`[u]; of INT4, `wide`[u] has 5 + `more`[u] bits and `narrow`[u] 3 - `more`[u]. */
typedef struct {
    uint8_t lines[KV_MAX_HEAD_DIM / 4 + 16]; /* and room for 16 after the last */
    uint8_t more[KV_MAX_HEAD_DIM / KV_UNIT];
    const uint8_t *wide, *even, *narrow;
} kv_key_order;

/* How a wide and a narrow line of INT4 are read from the bytes that they share: by a mask; by a shift and a mask. */
typedef struct { uint32_t wide, shift, narrow; } kv_key_bytes;
static const kv_key_bytes kv_key_shares[2] = {{0xF8F8F8F8, 5, 0xE0E0E0E0}, {0xFCFCFCFC, 6, 0xC0C0C0C0}};

/* Parts of a channel's scale: the fraction, and a flag. With n lines, the flag of channel i marks line i as wide, that of channel n + i
   line i as narrow, and that of channel 2 n + i line i as one of a wide line's `more`. */
enum { KV_FACTOR = 0x3FFF, KV_KEY_FLAG = 0x4000 };

static inline void kv_cut_key_order(const uint16_t *channels, int padded_dim, kv_key_order *order)
{
    const int lines = padded_dim / 4;
    order->wide = order->lines;
    order->even = order->lines + lines / 4;
    order->narrow = order->lines + (lines - lines / 4);
    for (int u = 0; u < padded_dim / KV_UNIT; u++) order->more[u] = channels[2 * lines + order->wide[u]] >> 14 & 1;
}

/* Whether line i is wide (0), even (1) or narrow (2). */
static inline int kv_key_width(const uint16_t *channels, int lines, int i)
{
    return channels[i] & KV_KEY_FLAG ? 0 : channels[lines + i] & KV_KEY_FLAG ? 2 : 1;
}

/* Reads the order from the flags. Lines are only sorted by them, so that each is there once whatever the flags are, as in bytes
   from elsewhere. */
static inline void kv_read_key_order(const uint16_t *channels, int padded_dim, kv_key_order *order)
{
    const int lines = padded_dim / 4;
    uint8_t *next[3] = {order->lines, NULL, NULL};
    int counts[3] = {0};
    for (int i = 0; i < lines; i++) counts[kv_key_width(channels, lines, i)]++;
    next[1] = next[0] + counts[0];
    next[2] = next[1] + counts[1];
    for (int i = 0; i < lines; i++) *next[kv_key_width(channels, lines, i)]++ = (uint8_t)i;
    kv_cut_key_order(channels, padded_dim, order);
}

/* Bits of each line, with `mean` in the mean. */
static inline void kv_key_bits(const kv_key_order *order, int padded_dim, int mean, uint8_t *bits)
{
    const int lines = padded_dim / 4;
    for (int i = 0; i < lines; i++) bits[order->lines[i]] = (uint8_t)(mean + (i < lines / 4) - (i >= lines - lines / 4));
    for (int u = 0; mean == 4 && u < padded_dim / KV_UNIT; u++) {
        bits[order->wide[u]] = (uint8_t)(5 + order->more[u]);
        bits[order->narrow[u]] = (uint8_t)(3 - order->more[u]);
    }
}

/* Writes a token's codes of all channels, each of as many bits as its line has. */
static inline void kv_put_key(uint8_t *codes, const kv_key_order *order, int mean, int padded_dim, int slot, const uint8_t *row)
{
    uint8_t *unit = kv_packed_unit(codes, mean, padded_dim, slot, 0) + slot % KV_LANES * 4;
    uint8_t *nibbles = unit + (slot % KV_LANES < 8 ? 64 : 32); /* of INT3 */
    const int shift = slot % KV_LANES / 8 * 4;
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 32 * mean, nibbles += 32 * mean)
        for (int i = 0; i < 4; i++) {
            const int wide = row[order->wide[u] * 4 + i], narrow = row[order->narrow[u] * 4 + i];
            const int even0 = row[order->even[2 * u] * 4 + i], even1 = row[order->even[2 * u + 1] * 4 + i];
            if (mean == 4) {
                unit[i] = (uint8_t)(even0 << 4 | even1);
                unit[64 + i] = (uint8_t)(wide << (3 - order->more[u]) | narrow);
            } else {
                unit[i] = (uint8_t)(even0 | even1 << 3 | narrow << 6);
                kv_put_bits(nibbles + i, wide, shift, 15);
            }
        }
}

/* Reads them as codes of all bits. */
static inline void kv_get_key(const uint8_t *codes, const kv_key_order *order, int mean, int padded_dim, int slot, uint8_t *row)
{
    const uint8_t *unit = kv_packed_unit((uint8_t *)codes, mean, padded_dim, slot, 0) + slot % KV_LANES * 4;
    const uint8_t *nibbles = unit + (slot % KV_LANES < 8 ? 64 : 32);
    const int shift = slot % KV_LANES / 8 * 4;
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 32 * mean, nibbles += 32 * mean) {
        const kv_key_bytes *shared = kv_key_shares + order->more[u];
        for (int i = 0; i < 4; i++) {
            row[order->even[2 * u] * 4 + i] = (uint8_t)(mean == 4 ? unit[i] & 0xF0 : unit[i] << 1 & 14);
            row[order->even[2 * u + 1] * 4 + i] = (uint8_t)(mean == 4 ? unit[i] << 4 : unit[i] >> 2 & 14);
            row[order->wide[u] * 4 + i] = (uint8_t)(mean == 4 ? unit[64 + i] & shared->wide : nibbles[i] >> shift & 15);
            row[order->narrow[u] * 4 + i] = (uint8_t)(mean == 4 ? unit[64 + i] << shared->shift : unit[i] >> 4 & 12);
        }
    }
}

#endif
