#define KV_FAST 1
#include "../common.h"
#include "../precision.h"

#if KV_X86 && KV_HAVE_AMX
KV_TARGET_BEGIN("popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#define KV(name) KV_OF_TIER(name, amx)
#define KV_ISA "amx"
#define KV_VNNI
#define KV_VBMI
#define KV_MATRIX
#include "../isa/vec_avx512.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
