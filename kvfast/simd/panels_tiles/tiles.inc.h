/* Panels by products of tiles of bytes, with what the tier has for them; see products_int8.inc.h. */
#ifdef KV_MATRIX
#define KV_TILE_UNIT 1
#else
#define KV_TILE_UNIT 0
#endif
#include "operands.inc.h"
#include "weights.inc.h"
#if KV_FAST
#include "weights_fast.inc.h"
#else
#include "weights_exact.inc.h"
#endif
#include "products_int8.inc.h"
#if KV_TILE_UNIT
#include "by_unit.inc.h"
#else
#include "by_vectors.inc.h"
#endif
#include "scores.inc.h"
#if KV_TILE_UNIT
#include "products_bfloat16.inc.h"
#endif
#include "panels.inc.h"
