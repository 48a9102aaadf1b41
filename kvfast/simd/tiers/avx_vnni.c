#include "../common.h"
#include "../precision.h"

#if KV_HAVE_AVX_VNNI
KV_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#define KV(name) KV_OF_TIER(name, avx_vnni)
#define KV_ISA "avx_vnni"
#define KV_BASE kv_kernels_avx2
#define KV_AVX_VNNI
#include "../isa/vec_avx2.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
