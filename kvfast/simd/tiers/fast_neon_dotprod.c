#define KV_FAST 1
#include "neon_dotprod.c"
