/* The families tiles8 and tiles_bf16: products of tiles with what the tier has for them, a matrix unit or vectors; see
   tiles8/products.inc.h. Both turn scores into weights and read a tile in the same way, which is in tiles8. */
#ifdef KV_MATRIX
#define KV_TILE_UNIT 1
#define KV_KEEP_AWAKE _tile_dpbssd(0, 1, 2)
#else
#define KV_TILE_UNIT 0
#define KV_KEEP_AWAKE (void)0
#endif
#include "tiles8/operands.inc.h"
#include "tiles_bf16/operands.inc.h"
#include "tiles8/weights.inc.h"
#include "tiles8/products.inc.h"
#if KV_TILE_UNIT
#include "tiles8/by_unit.inc.h"
#else
#include "tiles8/by_vectors.inc.h"
#endif
#include "tiles8/scores.inc.h"
#if KV_TILE_UNIT
#include "tiles_bf16/products.inc.h"
#endif
#include "tiles8/panels.inc.h"
