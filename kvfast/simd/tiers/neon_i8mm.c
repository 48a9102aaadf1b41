#include "../common.h"

#if KV_HAVE_I8MM
#if defined(__clang__)
KV_TARGET_BEGIN("i8mm")
#else
KV_TARGET_BEGIN("arch=armv8.2-a+i8mm")
#endif
#define KV(name) name##_neon_i8mm
#define KV_ISA "neon_i8mm"
#define KV_BASE kv_kernels_neon
#define KV_I8MM
#include "../isa/vec_neon.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
