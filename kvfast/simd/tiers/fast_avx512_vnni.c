#define KV_FAST 1
#include "avx512_vnni.c"
