/* Codes of 2, 3, 5, 6 and 7 bits, and of a trellis: their levels, and where their bits are.

   The levels are int8, so that INT8's kernels multiply them. With even levels, a code is the top bits of a biased byte,
   and its level the middle of the bytes with these top bits. From 6 bits on the Gaussian codebook is even, too: int8 is
   too coarse for the least error there, and a row's own range is as good.

   A unit is 16 lanes x 16 depths: 32 bytes for each bit of the code. INT8 has four lines for it: line l is depths 4 l to
   4 l + 3. A unit is cut into planes of 4, 2 and 1 bits, those that add up to the width, the lowest bits first:

     4 bits   128 bytes: lines 0 and 1 in the low and high nibbles of 64 bytes, then 2 and 3
     2 bits    64 bytes: line l in bits 2 l and 2 l + 1
     1 bit     32 bytes: the first 32 bytes of line l in bit l, the others in bit 4 + l

   INT3 keys with channel scales have evenly spaced codes of 2, 3 or 4 bits, as many for all tokens of a block and for the four
   depths of a line: 3 on average. The lowest two bits of line l are where they are without channel scales. The other bits
   follow each other, those of line 0 first, and take the places of the third bits of lines 0, 1, 2 and so on. */
#ifndef KVFAST_PACKED_H
#define KVFAST_PACKED_H

enum { KV_UNIT = 16 }; /* depths */

/* The quantisers with the least squared error for a Gaussian among those with int8 levels, + 128. Their errors are within
   1 % of those of Lloyd and Max. */
static const uint8_t kv_gauss_levels2[4] = {8, 92, 164, 248};
static const uint8_t kv_gauss_levels3[8] = {6, 52, 85, 114, 142, 171, 204, 250};
static const uint8_t kv_gauss_levels5[32] = {9,   30,  44,  54,  63,  71,  78,  84,  90,  96,  101,
                                             106, 111, 116, 121, 126, 130, 135, 140, 145, 150, 155,
                                             160, 166, 172, 178, 185, 193, 202, 212, 226, 247};

/* Levels + 128 by code, or NULL if they are evenly spaced. */
static inline const uint8_t *kv_packed_table(const kv_side *side)
{
    if (!side->gaussian) return NULL;
    return side->dtype == KV_INT2   ? kv_gauss_levels2
           : side->dtype == KV_INT3 ? kv_gauss_levels3
           : side->dtype == KV_INT5 ? kv_gauss_levels5
                                    : NULL;
}

/* The best unit of the levels for a Gaussian, in its standard deviations. */
static inline float kv_packed_spread(const kv_side *side)
{
    static const float even[] = {1.0006f / 64, 0.5884f / 32, 0.1877f / 8, 0.1042f / 4, 0.0572f / 2};
    static const float gaussian[] = {1.5994f / 127, 2.2408f / 127, 3.4890f / 127};
    return kv_packed_table(side) ? gaussian[side->dtype - KV_INT2] : even[side->dtype - KV_INT2];
}

/* The unit of (lane, depth) in a matrix of `depths` depths. */
static inline uint8_t *kv_packed_unit(uint8_t *codes, int bits, int depths, int lane, int depth)
{
    return codes + ((ptrdiff_t)(lane / KV_LANES) * (depths / KV_UNIT) + depth / KV_UNIT) * 32 * bits;
}

static inline void kv_put_bits(uint8_t *byte, int code, int shift, int mask)
{
    *byte = (uint8_t)((*byte & ~(mask << shift)) | (code & mask) << shift);
}

static inline void kv_put_packed(uint8_t *codes, int bits, int depths, int lane, int depth, int code)
{
    uint8_t *plane = kv_packed_unit(codes, bits, depths, lane, depth);
    const int line = depth % KV_UNIT / 4, at = lane % KV_LANES * 4 + depth % 4;
    if (bits & 4) {
        kv_put_bits(plane + line / 2 * 64 + at, code, line % 2 * 4, 15);
        plane += 128, code >>= 4;
    }
    if (bits & 2) {
        kv_put_bits(plane + at, code, line * 2, 3);
        plane += 64, code >>= 2;
    }
    if (bits & 1) kv_put_bits(plane + at % 32, code, line + at / 32 * 4, 1);
}

static inline int kv_get_packed(const uint8_t *codes, int bits, int depths, int lane, int depth)
{
    const uint8_t *plane = kv_packed_unit((uint8_t *)codes, bits, depths, lane, depth);
    const int line = depth % KV_UNIT / 4, at = lane % KV_LANES * 4 + depth % 4;
    int code = 0, shift = 0;
    if (bits & 4) {
        code = plane[line / 2 * 64 + at] >> line % 2 * 4 & 15;
        plane += 128, shift = 4;
    }
    if (bits & 2) {
        code |= (plane[at] >> line * 2 & 3) << shift;
        plane += 64, shift += 2;
    }
    if (bits & 1) code |= (plane[at % 32] >> (line + at / 32 * 4) & 1) << shift;
    return code;
}

/* Of a row of INT3 keys with channel scales: the bits of each line above the lowest two, and the line whose place has the first. */
typedef struct {
    uint8_t bits[KV_MAX_HEAD_DIM / 4], first[KV_MAX_HEAD_DIM / 4];
} kv_key_bits;

enum { KV_FACTOR = 0x3FFF, KV_KEY_BITS = 0x4000 }; /* parts of a channel's scale: the fraction, and a bit of kv_key_bits.bits */

/* Reads them from the channels' scales: the first two of each line have one bit each. Any bytes give codes that are in the block. */
static inline void kv_read_key_bits(const uint16_t *channels, int padded_dim, kv_key_bits *found)
{
    const int lines = padded_dim / 4;
    for (int line = 0, used = 0; line < lines; line++, channels += 4) {
        int bits = (channels[0] & KV_KEY_BITS ? 1 : 0) + (channels[1] & KV_KEY_BITS ? 2 : 0);
        bits = bits > 2 ? 2 : bits;
        bits = bits > lines - used ? lines - used : bits;
        found->bits[line] = (uint8_t)bits;
        found->first[line] = (uint8_t)used;
        used += bits;
    }
}

/* Writes a token's code of a channel. */
static inline void kv_put_key(uint8_t *codes, const kv_key_bits *key_bits, int padded_dim, int slot, int channel, int code)
{
    const int line = channel / 4, at = slot % KV_LANES * 4 + channel % 4;
    kv_put_bits(kv_packed_unit(codes, 3, padded_dim, slot, channel) + at, code, line % 4 * 2, 3);
    for (int i = 0, place = key_bits->first[line]; i < key_bits->bits[line]; i++, place++)
        kv_put_bits(kv_packed_unit(codes, 3, padded_dim, slot, place * 4) + 64 + at % 32, code >> (2 + i),
                    place % 4 + at / 32 * 4, 1);
}

static inline int kv_get_key(const uint8_t *codes, const kv_key_bits *key_bits, int padded_dim, int slot, int channel)
{
    const int line = channel / 4, at = slot % KV_LANES * 4 + channel % 4;
    int code = kv_packed_unit((uint8_t *)codes, 3, padded_dim, slot, channel)[at] >> line % 4 * 2 & 3;
    for (int i = 0, place = key_bits->first[line]; i < key_bits->bits[line]; i++, place++)
        code |= (kv_packed_unit((uint8_t *)codes, 3, padded_dim, slot, place * 4)[64 + at % 32] >> (place % 4 + at / 32 * 4) & 1)
                << (2 + i);
    return code;
}

/* Level + 128. */
static inline uint8_t kv_packed_level(const uint8_t *table, int bits, int code)
{
    return (uint8_t)(table ? table[code] : code << (8 - bits) | 1 << (7 - bits));
}

#endif
