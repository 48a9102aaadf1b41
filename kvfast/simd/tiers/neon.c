#include "../common.h"

#if KV_ARM64
#define KV(name) name##_neon
#define KV_ISA "neon"
#include "../isa/vec_neon.h"
#include "../tier.inc.h"
#endif
