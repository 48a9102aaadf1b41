/* Keys of INT3 and INT4 with channel scales. Their codes are evenly spaced. Lines of four depths have few or many bits, the same
   for all tokens of a block: with b bits in the mean, a quarter of the lines has b + 1, a quarter b - 1. All are read as the high
   bits of codes of b + 1 bits: channels with few bits then need no larger scales, so the rounding of queries counts no more.

   Four lines of 64 codes, at [token % 16][depth % 4], are a unit of 32 x b bytes: one line of many bits ("wide"), two of b
   ("even"), one of few ("narrow"). A shift and a mask read them:

     INT4   64 bytes: an even line in the low nibble, the other in the high one
            64 bytes: the wide line in bits 0 to 4, the narrow one in bits 5 to 7
     INT3   64 bytes: an even line in bits 0 to 2, the other in bits 3 to 5, the narrow one in bits 6 and 7
            32 bytes: the first 32 bytes of the wide line in the low nibble, the others in the high one */
#ifndef KVFAST_KEYS_H
#define KVFAST_KEYS_H

#include "packed.h"

/* The middle of the codes as they are read: 0 to 31 for INT4, 0 to 15 for INT3. */
#define KV_KEY_BIAS(dtype) (1 << kv_dtypes[dtype].bits)

/* The lines in the order of their bits: the wide ones, the even ones, the narrow ones. Unit u has the lines `wide`[u], `even`[2 u],
   `even`[2 u + 1] and `narrow`[u]. */
typedef struct {
    uint8_t lines[KV_MAX_HEAD_DIM / 4 + 16]; /* and room for 16 behind the last */
    const uint8_t *wide, *even, *narrow;
} kv_key_order;

/* Parts of a channel's scale: the fraction, and a flag. With n lines, the flag of channel i marks line i as wide, that of channel n + i
   line i as narrow. */
enum { KV_FACTOR = 0x3FFF, KV_KEY_FLAG = 0x4000 };

static inline void kv_cut_key_order(kv_key_order *order, int padded_dim)
{
    const int lines = padded_dim / 4;
    order->wide = order->lines;
    order->even = order->lines + lines / 4;
    order->narrow = order->lines + (lines - lines / 4);
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
    kv_cut_key_order(order, padded_dim);
}

/* Bits of each line, with `mean` in the mean. */
static inline void kv_key_bits(const kv_key_order *order, int padded_dim, int mean, uint8_t *bits)
{
    const int lines = padded_dim / 4;
    for (int i = 0; i < lines; i++) bits[order->lines[i]] = (uint8_t)(mean + (i < lines / 4) - (i >= lines - lines / 4));
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
            const int even = row[order->even[2 * u] * 4 + i] | row[order->even[2 * u + 1] * 4 + i] << mean;
            if (mean == 4) {
                unit[i] = (uint8_t)even;
                unit[64 + i] = (uint8_t)(wide | narrow << 5);
            } else {
                unit[i] = (uint8_t)(even | narrow << 6);
                kv_put_bits(nibbles + i, wide, shift, 15);
            }
        }
}

/* Reads them as codes of all bits. */
static inline void kv_get_key(const uint8_t *codes, const kv_key_order *order, int mean, int padded_dim, int slot, uint8_t *row)
{
    const uint8_t *unit = kv_packed_unit((uint8_t *)codes, mean, padded_dim, slot, 0) + slot % KV_LANES * 4;
    const uint8_t *nibbles = unit + (slot % KV_LANES < 8 ? 64 : 32);
    const int shift = slot % KV_LANES / 8 * 4, most = (1 << mean) - 1;
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 32 * mean, nibbles += 32 * mean)
        for (int i = 0; i < 4; i++) {
            row[order->even[2 * u] * 4 + i] = (uint8_t)((unit[i] & most) << 1);
            row[order->even[2 * u + 1] * 4 + i] = (uint8_t)((unit[i] >> mean & most) << 1);
            row[order->wide[u] * 4 + i] = mean == 4 ? unit[64 + i] & 31 : nibbles[i] >> shift & 15;
            row[order->narrow[u] * 4 + i] = mean == 4 ? unit[64 + i] >> 3 & 28 : unit[i] >> 4 & 12;
        }
}

#endif
