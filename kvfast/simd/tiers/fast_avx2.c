#define KV_FAST 1
#include "avx2.c"
