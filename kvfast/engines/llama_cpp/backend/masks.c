/* What query rows see of a tile, and what ggml's masks add to their scores. */
#include "call.h"

#include <math.h>
#include <string.h>

enum { HIDDEN = 0xFC00,
       MAGNITUDE = 0x7FFF }; /* minus infinity in float16 */

/* ggml's slope of a query head for ALiBi. */
static float slope_of(const call *c, int64_t head)
{
    if (c->max_bias <= 0) return 1.0f;
    const uint32_t power = 1u << (uint32_t)floor(log2((double)c->q->ne[2]));
    if (head < power) return powf(powf(2.0f, -c->max_bias / (float)power), (float)(head + 1));
    return powf(powf(2.0f, -c->max_bias / 2.0f / (float)power), (float)(2 * (head - power) + 1));
}

/* The tokens of a mask that are not minus infinity, from *from to *to; returns whether they need more than that: some within, or a
   bias. */
static bool range_of(const uint16_t *mask, int count, int *from, int *to)
{
    int first = 0, last = count;
    uint16_t others = 0;
    while (first < last && mask[first] == HIDDEN) first++;
    while (last > first && mask[last - 1] == HIDDEN) last--;
    for (int t = first; t < last; t++) others |= mask[t];
    *from = first;
    *to = last;
    return (others & MAGNITUDE) != 0;
}

static const char *masks_of(const call *c, int64_t stream)
{
    return (const char *)c->mask->data + stream % c->mask->ne[3] * c->mask->nb[3];
}

int64_t kv_end_of(const call *c, int64_t stream, int64_t query)
{
    int64_t end = c->mask ? 1 : c->tokens;
    for (int64_t head = 0; c->mask && head < c->mask->ne[2]; head++) {
        const uint16_t *mask = (const uint16_t *)(masks_of(c, stream) + query * c->mask->nb[1] + head * c->mask->nb[2]);
        int64_t seen = c->tokens;
        while (seen > end && mask[seen - 1] == HIDDEN) seen--;
        end = seen;
    }
    return end;
}

const uint16_t *kv_sparse_mask(const kv_task *t, int64_t begin, int64_t stop)
{
    const call *c = t->call->given;
    if (!c->mask || c->q->ne[1] > 1 || c->mask->ne[2] > 1) return NULL;
    const uint16_t *mask = (const uint16_t *)masks_of(c, stream_of(t));
    int64_t seen = 0;
    uint16_t bent = 0;
    for (int64_t i = begin; i < stop; i++) {
        const uint16_t shown = mask[i] != HIDDEN;
        seen += shown;
        bent |= (uint16_t)-shown & mask[i];
    }
    if (2 * seen >= stop - begin || bent & MAGNITUDE) return NULL;
    /* Packed tiles are the same as those where they lie if nothing is left out before the last token. */
    int from, to;
    range_of(mask + begin, (int)(stop - begin), &from, &to);
    return !seen || (to - from > seen ? !c->strict : !c->invariant || from == 0) ? mask : NULL;
}

int kv_next_seen(const uint16_t *mask, int64_t *token, int64_t stop, int most, int32_t *tokens)
{
    int count = 0;
    int64_t at = *token;
    for (; at < stop && count < most; at++) {
        tokens[count] = (int32_t)at;
        count += mask[at] != HIDDEN;
    }
    *token = at;
    return count;
}

void kv_see_all(const kv_task *t, int count)
{
    scratch *own = t->own;
    memset(own->biased, 0, sizeof own->biased);
    for (int r = 0; r < t->rows; r++) own->from[r] = 0, own->to[r] = own->seen[r / KV_ROWS] = count;
}

bool kv_find_seen(const kv_task *t, int64_t token, int count)
{
    const call *c = t->call->given;
    const int64_t group = t->call->group;
    const struct ggml_tensor *mask = c->mask;
    scratch *own = t->own;
    memset(own->seen, 0, sizeof own->seen);
    memset(own->biased, 0, sizeof own->biased);
    if (!mask) {
        kv_see_all(t, count);
        return true;
    }
    const char *masks = masks_of(c, stream_of(t)) + token * 2, *last = NULL;
    bool any = false, bent = false;
    int64_t query = query_of(t, t->first_row), member = t->first_row % group; /* counted, as dividing takes longer than the mask */
    for (int r = 0; r < t->rows; r++, member++) {
        if (member == group) member = 0, query++;
        const int64_t head = t->head * group + member;
        const char *at = masks + query * mask->nb[1] + (mask->ne[2] > 1 ? head % mask->ne[2] * mask->nb[2] : 0);
        if (at == last) {
            own->from[r] = own->from[r - 1];
            own->to[r] = own->to[r - 1];
        } else {
            for (int i = 0; i < 2 * count; i += 64) __builtin_prefetch(at + 2 * count + i, 0, 2); /* of the next tile */
            bent = range_of((const uint16_t *)at, count, own->from + r, own->to + r);
        }
        last = at;
        if (own->from[r] == own->to[r]) continue;
        own->seen[r / KV_ROWS] = (int)larger(own->seen[r / KV_ROWS], own->to[r]);
        any = true;
        if (!bent) continue;
        float *bias = own->bias + r / KV_ROWS * KV_ROWS * KV_TILE;
        if (!own->biased[r / KV_ROWS]) memset(bias, 0, KV_ROWS * KV_TILE * sizeof *bias);
        own->biased[r / KV_ROWS] = 1;
        bias += r % KV_ROWS * KV_TILE;
        t->call->kernels->to_float[KV_FLOAT16](at, count, bias);
        const float slope = slope_of(c, head);
        for (int i = 0; slope != 1.0f && i < count; i++) bias[i] *= slope;
    }
    return any;
}
