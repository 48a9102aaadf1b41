#include "../common.h"
#include "../precision.h"

#if KV_HAVE_DOTPROD
#if defined(__clang__)
KV_TARGET_BEGIN("dotprod")
#else
KV_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#endif
#define KV(name) KV_OF_TIER(name, neon_dotprod)
#define KV_ISA "neon_dotprod"
#define KV_BASE kv_kernels_neon
#define KV_DOTPROD
#include "../isa/vec_neon.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
