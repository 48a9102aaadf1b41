/* The precision that a file of tiers/ is compiled for: fast with KV_FAST 1, as tiers/fast_*.c set it, else exact; see
   vectors/activations.inc.h. And the names of a tier's functions. */
#ifndef KVFAST_PRECISION_H
#define KVFAST_PRECISION_H

#ifndef KV_FAST
#define KV_FAST 0
#endif
#if KV_FAST
#define KV_OF_TIER(name, tier) name##_##tier##_fast
#else
#define KV_OF_TIER(name, tier) name##_##tier
#endif

#endif
