#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "product/plan.hpp"

/// How products by `wgmma`, the product instruction of compute capability 9.0a, are cut into the
/// work of blocks, and where in memory its parts lie. For the host; the kernels check that these
/// numbers are theirs.
namespace metatomic_tc::wgmma {

/// Rows of a tile.
constexpr int tile_m = 128;
/// Elements of K in a step of the packed weight.
constexpr int step_k = 32;
/// Elements of K whose sum is kept apart: a sum of many steps loses accuracy.
constexpr int long_k = 512;
/// The largest K of products that keep slices of rows in shared memory.
constexpr int shared_slices_k = 256;
/// Tiles of a product whose K is in parts and that can use a weight that was packed before.
constexpr int64_t most_tiles_in_parts = 1024;

/// What the host needs to know of a kernel; see kernels.inc.
struct Form {
    Kernel kernel;
    Kernel tilings;
    int step_k;
    int weight_row_bytes;
    bool scaled;
    bool has_narrow_tiles;
};

constexpr Form forms[] = {
#define WGMMA_KERNEL(kernel, mode, tilings, k, row_bytes, scaled, narrow)                          \
    {Kernel::kernel, Kernel::tilings, k, row_bytes, scaled, narrow},
#include "kernels.inc"
#undef WGMMA_KERNEL
};

constexpr Form form_of(Kernel kernel) {
    for (const auto &form : forms) {
        if (form.kernel == kernel) {
            return form;
        }
    }
    throw std::logic_error("This kernel does not use wgmma.");
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/// Tiles of a product, and steps of K.
struct Extent {
    int64_t tiles_m, tiles_n;
    /// Of the kernel, and in them of the packed weight.
    int64_t steps, packed_steps;

    explicit Extent(const Plan &plan);

    int64_t tiles() const {
        return tiles_m * tiles_n;
    }
};

/// Offsets in bytes of the parts of a packed weight.
struct PackedLayout {
    /// Tiles of N, in them steps of K.
    std::size_t weight;
    /// FP32, the inverse of each row's scale
    std::size_t inverses;
    /// For each half of a tile the number of parts of K that are done: 0 before and after a
    /// product.
    std::size_t finished_parts;
    int64_t counters;
    std::size_t size;

    explicit PackedLayout(const Plan &plan);
};

/// Offsets in bytes of the parts of a launch's memory; all FP32.
struct WorkspaceLayout {
    /// [tiles, splits, values of a tile], unused with one part of K
    std::size_t partial_sums;
    /// [blocks, values of a tile], unused where K is not long
    std::size_t long_sums;
    /// A with rows aligned to 16 bytes, where those of the caller are not.
    std::size_t rows;
    int64_t rows_ld;
    std::size_t size;

    explicit WorkspaceLayout(const Plan &plan);
};

/// Fills in all that follows from the kernel of `plan`, with the tiling that tilings.inc has for
/// it.
/// @throws std::invalid_argument where the kernel has no room for K
void choose_tiling(Plan &plan);

/// The same with this tiling.
/// @throws std::invalid_argument where the kernel has no such tiling
void set_tiling(Plan &plan, int tile_n, int splits);

} // namespace metatomic_tc::wgmma
