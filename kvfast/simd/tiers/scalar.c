#include "../common.h"

#define KV(name) name##_scalar
#define KV_ISA "scalar"
#include "../isa/vec_scalar.h"
#include "../tier.inc.h"
