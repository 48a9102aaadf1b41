#include "../common.h"
#include "../precision.h"

#if KV_X86
#define KV_TARGET "popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c"
KV_TARGET_BEGIN(KV_TARGET)
#define KV(name) KV_OF_TIER(name, avx512_vbmi)
#define KV_ISA "avx512_vbmi"
#define KV_BASE kv_kernels_avx512
#define KV_VNNI
#define KV_VBMI
#if KV_HAVE_AMX && !KV_FAST /* fast_amx.c has those of the fast precision */
#define KV_MATRIX KV_TARGET ",amx-tile,amx-int8,amx-bf16"
#endif
#include "../isa/vec_avx512.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
