/* What quantize.c and search.c agree on: how the scales of a matrix are chosen. */
#ifndef FP4_SEARCH_H
#define FP4_SEARCH_H

#include "vector.h"

/* rule          as fp4.h numbers them; weights decide where there are any
 * global_scale  of NVFP4
 * weights       of the squares, one to a column, as codec.weigh makes them, or NULL; columns divides the number of elements */
typedef struct {
    int64_t rule;
    float global_scale;
    const float *weights;
    int64_t columns;
} Choice;

/* Scales of consecutive blocks, the first of which is number `first` of the matrix; x: their elements. */
void NAME(choose_nvfp4)(const float *restrict x, int64_t first, int blocks, const Choice *choice, uint8_t *restrict block_scales);
void NAME(choose_mxfp4)(const float *restrict x, int64_t first, int blocks, const Choice *choice, uint8_t *restrict block_scales);

#endif
