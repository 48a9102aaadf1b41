#include "../common.h"

#if KV_HAVE_BF16
#if defined(__clang__)
KV_TARGET_BEGIN("i8mm,bf16")
#else
KV_TARGET_BEGIN("arch=armv8.2-a+i8mm+bf16")
#endif
#define KV(name) name##_neon_bf16
#define KV_ISA "neon_bf16"
#define KV_I8MM
#ifndef KV_MORE_KERNELS /* others read the floats of queries, too */
#define KV_BF16
#endif
#include "../isa/vec_neon.h"
#include "../tier.inc.h"
KV_TARGET_END
#endif
