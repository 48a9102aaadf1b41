#include "../common.h"

#if KV_SSE2
#define KV(name) name##_sse2
#define KV_ISA "sse2"
#include "../isa/vec_sse2.h"
#include "../tier.inc.h"
#endif
