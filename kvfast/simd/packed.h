/* Codes of 2, 3, 5, 6 and 7 bits, and of a trellis: their levels, and where their bits are.

   The levels are int8, so that INT8's kernels multiply them. With even levels, a code is the top bits of a biased byte,
   and its level the middle of the bytes with these top bits. From 6 bits on the Gaussian codebook is even, too: int8 is
   too coarse for the least error there, and a row's own range is as good.

   A unit is 16 lanes x 16 depths: 32 bytes for each bit of the code. INT8 has four lines for it: line l is depths 4 l to
   4 l + 3. A unit of 2, 5, 6 or 7 bits is cut into planes of 4, 2 and 1 bits, those that add up to the width, the lowest bits
   first:

     4 bits   128 bytes: lines 0 and 1 in the low and high nibbles of 64 bytes, then 2 and 3
     2 bits    64 bytes: line l in bits 2 l and 2 l + 1
     1 bit     32 bytes: the first 32 bytes of line l in bit l, the others in bit 4 + l

   A unit of 3 bits keeps three lines in one piece, so that a shift and a mask read them:

     64 bytes: line 0 in bits 0 to 2, line 1 in bits 3 to 5, the low two bits of line 3 in bits 6 and 7
     32 bytes: the first 32 bytes of line 2 in bits 0 to 2, the others in bits 4 to 6, and the high bit of line 3 above them

   INT3 keys with channel scales have evenly spaced codes of 2, 3 or 4 bits, as many for all tokens of a block and for the four
   depths of a line: a quarter of the lines has 4, a quarter 2. Each unit has one line of 4 bits in the place of line 2, with the
   bit above it, two of 3 bits in the places of lines 0 and 1, and one of 2 bits in bits 6 and 7. They are read as the high bits
   of codes of 4 bits: channels with few bits then need no larger scales, and the rounding of queries counts no more than with
   INT4. */
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
    if (bits == 3) {
        uint8_t *nibbles = plane + 64 + at % 32;
        if (line < 2) kv_put_bits(plane + at, code, 3 * line, 7);
        else if (line == 2) kv_put_bits(nibbles, code, at / 32 * 4, 7);
        else kv_put_bits(plane + at, code, 6, 3), kv_put_bits(nibbles, code >> 2, at / 32 * 4 + 3, 1);
        return;
    }
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
    if (bits == 3) {
        const int nibble = plane[64 + at % 32] >> at / 32 * 4;
        return line < 2 ? plane[at] >> 3 * line & 7 : line == 2 ? nibble & 7 : plane[at] >> 6 | (nibble & 8) >> 1;
    }
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

/* Lines of INT3 keys with channel scales in the order of their bits: a quarter with 4, half with 3, a quarter with 2. Unit u has
   the lines `wide`[u], `even`[2 u], `even`[2 u + 1] and `narrow`[u]. */
typedef struct {
    uint8_t lines[KV_MAX_HEAD_DIM / 4];
    const uint8_t *wide, *even, *narrow;
} kv_key_order;

/* Parts of a channel's scale: the fraction, and a flag. Those of the first four channels of a unit mark its lines with 4 bits,
   those of the next four the lines with 2. */
enum { KV_FACTOR = 0x3FFF, KV_KEY_FLAG = 0x4000 };

/* The flags of four channels. */
static inline uint64_t kv_key_flags(const uint16_t *channels)
{
    /* The product brings the lowest bits of four 16-bit words side by side to bits 48 to 51. */
    const uint64_t flags = (uint64_t)kv_load64(channels) >> 14 & 0x0001000100010001;
    return flags * 0x0001000200040008 >> 48 & 15;
}

/* Reads the order from the flags. Lines are only sorted by them, so that each is there once whatever the flags are, as in bytes
   from elsewhere. */
static inline void kv_read_key_order(const uint16_t *channels, int padded_dim, kv_key_order *order)
{
    enum { WORDS = (KV_MAX_HEAD_DIM / 4 + 63) / 64 };
    const int lines = padded_dim / 4;
    uint64_t masks[3][WORDS] = {{0}};
    for (int line = 0; line < lines; line += 4, channels += KV_UNIT) {
        const uint64_t wide = kv_key_flags(channels), narrow = kv_key_flags(channels + 4) & ~wide;
        masks[0][line / 64] |= wide << line % 64;
        masks[1][line / 64] |= (15 & ~(wide | narrow)) << line % 64;
        masks[2][line / 64] |= narrow << line % 64;
    }
    uint8_t *next = order->lines;
    for (int width = 0; width < 3; width++)
        for (int word = 0; word < WORDS && word * 64 < lines; word++)
            for (uint64_t mask = masks[width][word]; mask; mask &= mask - 1) {
                *next++ = (uint8_t)(word * 64 + __builtin_ctzll(mask));
                __asm__("" : "+r"(next)); /* gcc would count the bits, by an instruction that is not of all tiers */
            }
    order->wide = order->lines;
    order->even = order->lines + lines / 4;
    order->narrow = order->lines + (lines - lines / 4);
}

/* Bits of each line. */
static inline void kv_key_bits(const kv_key_order *order, int padded_dim, uint8_t *bits)
{
    const int lines = padded_dim / 4;
    for (int i = 0; i < lines; i++) bits[order->lines[i]] = (uint8_t)(i < lines / 4 ? 4 : i < lines - lines / 4 ? 3 : 2);
}

/* Writes a token's codes of all channels, of as many bits as each has. */
static inline void kv_put_key(uint8_t *codes, const kv_key_order *order, int padded_dim, int slot, const uint8_t *row)
{
    uint8_t *unit = kv_packed_unit(codes, 3, padded_dim, slot, 0) + slot % KV_LANES * 4;
    uint8_t *nibbles = unit + (slot % KV_LANES < 8 ? 64 : 32);
    const int shift = slot % KV_LANES / 8 * 4;
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 96, nibbles += 96)
        for (int i = 0; i < 4; i++) {
            unit[i] = (uint8_t)(row[order->even[2 * u] * 4 + i] | row[order->even[2 * u + 1] * 4 + i] << 3 |
                                row[order->narrow[u] * 4 + i] << 6);
            kv_put_bits(nibbles + i, row[order->wide[u] * 4 + i], shift, 15);
        }
}

/* Reads them as codes of 4 bits. */
static inline void kv_get_key(const uint8_t *codes, const kv_key_order *order, int padded_dim, int slot, uint8_t *row)
{
    const uint8_t *unit = kv_packed_unit((uint8_t *)codes, 3, padded_dim, slot, 0) + slot % KV_LANES * 4;
    const uint8_t *nibbles = unit + (slot % KV_LANES < 8 ? 64 : 32);
    const int shift = slot % KV_LANES / 8 * 4;
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 96, nibbles += 96)
        for (int i = 0; i < 4; i++) {
            row[order->even[2 * u] * 4 + i] = unit[i] << 1 & 14;
            row[order->even[2 * u + 1] * 4 + i] = unit[i] >> 2 & 14;
            row[order->narrow[u] * 4 + i] = unit[i] >> 4 & 12;
            row[order->wide[u] * 4 + i] = nibbles[i] >> shift & 15;
        }
}

/* Level + 128. */
static inline uint8_t kv_packed_level(const uint8_t *table, int bits, int code)
{
    return (uint8_t)(table ? table[code] : code << (8 - bits) | 1 << (7 - bits));
}

#endif
