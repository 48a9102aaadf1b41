#include "../common.h"
#include "../precision.h"

#if KV_X86
KV_TARGET_BEGIN("popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define KV(name) KV_OF_TIER(name, avx512_vnni)
#define KV_ISA "avx512_vnni"
#define KV_BASE kv_kernels_avx512
#define KV_VNNI
#include "../isa/vec_avx512.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
