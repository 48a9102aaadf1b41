/* Codes of 2, 3, 5, 6 and 7 bits: their levels, and where their bits are.

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
     32 bytes: the first 32 bytes of line 2 in bits 0 to 2, the others in bits 4 to 6, and the high bit of line 3 above them */
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

/* Level + 128. */
static inline uint8_t kv_packed_level(const uint8_t *table, int bits, int code)
{
    return (uint8_t)(table ? table[code] : code << (8 - bits) | 1 << (7 - bits));
}

#endif
