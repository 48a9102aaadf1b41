#include "../common.h"
#include "../precision.h"

#if KV_X86
KV_TARGET_BEGIN("avx2,fma,f16c")
#define KV(name) KV_OF_TIER(name, avx2)
#define KV_ISA "avx2"
#include "../isa/vec_avx2.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
