#define KV_FAST 1
#include "avx_vnni.c"
