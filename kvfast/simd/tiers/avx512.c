#include "../common.h"

#if KV_X86
KV_TARGET_BEGIN("popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define KV(name) name##_avx512
#define KV_ISA "avx512"
#include "../isa/vec_avx512.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
