#pragma once

// The tiles of a product and their order, for the kernels of compute capability 9.0a.
#include <cstdint>

#include "layout.hpp"
#include "product/gemm.hpp"

namespace metatomic_tc::wgmma {

constexpr int consumer_warps = 8;
/// Tiles of rows that run at about the same time, to share what they read of the weight.
constexpr int raster_rows = 8;

/// Shape and pointers of a launch.
struct Parameters {
    Gemm problem;
    /// Packed weight: tiles of N, in them steps of K.
    const unsigned char *weight;
    /// Inverse scale of each row of the weight, for the modes that scale it.
    const float *weight_scales;
    int tiles_m;
    int tiles_n;
    /// Steps of K.
    int steps;
    /// Parts that K is cut into, each the work of one block.
    int splits;
    /// Sums of the parts, [tiles, splits, values of a tile], and for each half of a tile the number
    /// of parts that are there; unused with one part.
    float *partial_sums;
    unsigned *finished_parts;
    /// [blocks, values of a tile]: sums of the steps before the last `long_k` elements; unused
    /// where there are no more.
    float *long_sums;
    /// All rows of C, bias and pre-activation are aligned to 16 bytes, and N to 4.
    bool aligned;
};

/// The work of a block, one item after another: a part of K of a tile.
struct Work {
    int item;
    int tile_row, tile_column, split;
    int first_step, steps;

    __device__ explicit Work(const Parameters &parameters) : item(blockIdx.x) {
        locate(parameters);
    }

    __device__ bool done(const Parameters &parameters) const {
        return item >= parameters.tiles_m * parameters.tiles_n * parameters.splits;
    }

    __device__ void next(const Parameters &parameters) {
        item += gridDim.x;
        locate(parameters);
    }

  private:
    __device__ void locate(const Parameters &parameters) {
        auto index = item;
        split = 0;
        first_step = 0;
        steps = parameters.steps;
        if (parameters.splits > 1) {
            index = item / parameters.splits;
            split = item % parameters.splits;
            first_step = split * parameters.steps / parameters.splits;
            steps = (split + 1) * parameters.steps / parameters.splits - first_step;
        }
        auto group_size = raster_rows * parameters.tiles_n;
        auto group = index / group_size;
        // past the end, the numbers do not matter
        auto rows = max(min(parameters.tiles_m - group * raster_rows, raster_rows), 1);
        tile_column = index % group_size / rows;
        tile_row = group * raster_rows + index % group_size - tile_column * rows;
    }
};

/// Position in the ring of stages.
template <int Stages> struct Ring {
    int index = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        index++;
        if (index == Stages) {
            index = 0;
            parity ^= 1;
        }
    }
};

} // namespace metatomic_tc::wgmma
