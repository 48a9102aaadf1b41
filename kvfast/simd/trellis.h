/* Codes of a trellis: 4 bits whose levels depend on the codes before them.

   A trellis-coded quantiser (Marcellin and Fischer, Trellis coded quantization of memoryless and Gauss-Markov sources,
   1990) of 128 states, with a trained table as in QTIP (arXiv 2406.11235); bench/studies/trellis_table.py trains one. Its state is
   the lowest bits of the last seven codes, the newest as bit 0. Three parities of these bits are the context, and the level
   is in a table of 8 contexts x 16 codes. So the decoder finds all levels of a row at once, by a few XORs and one look-up
   each, while the encoder searches for the best of all paths (Viterbi). On Gaussian rows of 128 elements the error is
   0.0048 of the energy. 16 fixed levels leave 0.0079, and no code of 4 bits and a scale can leave less than 0.0033.

   The chain of a row goes through its depths in steps, from state 0: first the multiples of `step`, then the depths after
   these, and so on. A step is the number of depths of a row in one line: 4 for keys, 16 for values. So the codes that
   precede those of a line are a line, too. */
#ifndef KVFAST_TRELLIS_H
#define KVFAST_TRELLIS_H

enum { KV_TRELLIS_MEMORY = 7, KV_TRELLIS_STATES = 1 << KV_TRELLIS_MEMORY };

static inline int kv_trellis_step(int values) { return values ? KV_LANES : 4; }

/* The unit of the levels, in standard deviations of a Gaussian. */
#define KV_TRELLIS_UNIT (3.3916f / 127.0f)

/* Contexts of the states. */
static const int8_t kv_trellis_contexts[KV_TRELLIS_STATES] = {
    0, 4, 1, 5, 3, 7, 2, 6, 4, 0, 5, 1, 7, 3, 6, 2, 2, 6, 3, 7, 1, 5, 0, 4, 6, 2, 7, 3, 5, 1, 4, 0, 2, 6, 3, 7, 1,
    5, 0, 4, 6, 2, 7, 3, 5, 1, 4, 0, 0, 4, 1, 5, 3, 7, 2, 6, 4, 0, 5, 1, 7, 3, 6, 2, 4, 0, 5, 1, 7, 3, 6, 2, 0, 4,
    1, 5, 3, 7, 2, 6, 6, 2, 7, 3, 5, 1, 4, 0, 2, 6, 3, 7, 1, 5, 0, 4, 6, 2, 7, 3, 5, 1, 4, 0, 2, 6, 3, 7, 1, 5, 0,
    4, 4, 0, 5, 1, 7, 3, 6, 2, 0, 4, 1, 5, 3, 7, 2, 6,
};

/* Levels + 128 by context and code; code 2 p + b has bit b of the next state. */
static const uint8_t kv_trellis_table[8 * 16] = {
    2, 52, 69, 83, 93, 102, 110, 118, 125, 133, 141, 148, 157, 167, 181, 205, 35, 65, 80, 89, 99, 108, 115, 124,
    131, 138, 146, 154, 163, 173, 188, 211, 51, 73, 85, 95, 104, 112, 119, 126, 134, 143, 151, 160, 169, 180, 196,
    227, 45, 71, 85, 97, 106, 114, 121, 129, 135, 143, 151, 159, 169, 179, 193, 238, 41, 67, 81, 93, 101, 110, 118,
    126, 133, 140, 148, 156, 166, 176, 192, 220, 58, 77, 90, 99, 107, 116, 123, 130, 138, 146, 154, 164, 175, 186,
    199, 255, 18, 63, 77, 86, 94, 104, 112, 121, 129, 136, 143, 150, 160, 170, 186, 211, 28, 59, 76, 89, 98, 106,
    114, 122, 129, 137, 144, 152, 161, 172, 183, 203,
};

/* For the encoder, in half units: the levels by p, b and context, and the bounds between those of a context and b. */
static const float kv_trellis_doubled[8][16] = {
    {-252, -186, -154, -166, -174, -140, -220, -200, -152, -126, -110, -114, -122, -102, -130, -138},
    {-118, -96, -86, -86, -94, -76, -102, -104, -90, -78, -66, -62, -70, -58, -84, -78},
    {-70, -58, -48, -44, -54, -42, -68, -60, -52, -40, -32, -28, -36, -24, -48, -44},
    {-36, -26, -18, -14, -20, -10, -32, -28, -20, -8, -4, 2, -4, 4, -14, -12},
    {-6, 6, 12, 14, 10, 20, 2, 2, 10, 20, 30, 30, 24, 36, 16, 18},
    {26, 36, 46, 46, 40, 52, 30, 32, 40, 52, 64, 62, 56, 72, 44, 48},
    {58, 70, 82, 82, 76, 94, 64, 66, 78, 90, 104, 102, 96, 116, 84, 88},
    {106, 120, 136, 130, 128, 142, 116, 110, 154, 166, 198, 220, 184, 254, 166, 150},
};
static const float kv_trellis_bounds[8][2][7] = {
    {{-185, -94, -53, -21, 10, 42, 82}, {-121, -71, -36, -5, 25, 59, 116}},
    {{-141, -77, -42, -10, 21, 53, 95}, {-102, -59, -24, 6, 36, 71, 128}},
    {{-120, -67, -33, -3, 29, 64, 109}, {-88, -49, -18, 13, 47, 84, 151}},
    {{-126, -65, -29, 0, 30, 64, 106}, {-88, -45, -13, 16, 46, 82, 161}},
    {{-134, -74, -37, -5, 25, 58, 102}, {-96, -53, -20, 10, 40, 76, 140}},
    {{-108, -59, -26, 5, 36, 73, 118}, {-80, -41, -10, 20, 54, 94, 185}},
    {{-161, -85, -50, -15, 16, 47, 90}, {-107, -66, -31, 1, 30, 64, 125}},
    {{-152, -82, -44, -13, 17, 49, 88}, {-108, -61, -28, 3, 33, 68, 119}},
};

/* The contexts of states, in bits 4 to 6: the same as kv_trellis_contexts. Works on words of four states. */
#define KV_TRELLIS_CONTEXT(state) \
    ((((state) << 3 ^ (state) << 2) & 0x10101010) | (((state) << 3 ^ (state) << 1 ^ (state)) & 0x20202020) | \
     (((state) << 6 ^ (state) << 3 ^ (state)) & 0x40404040))

#endif
