#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "metatomic_tc/modes.hpp"

namespace metatomic_tc {

/// How a mode multiplies: the slices of each operand and the products of slices, in bands of equal
/// scale from the smallest to the largest. `{i, j}` is slice i of the input times slice j of the
/// weight; slice 0 is the largest.
struct SliceProducts {
    int slices;
    /// Slice i is kept as scale^i times its value, so that the slices of tiny numbers are not
    /// subnormal; the product of slices i and j is therefore scale^(i+j) times its value.
    float scale;
    std::vector<std::vector<std::pair<int, int>>> bands;
};

/// @throws std::logic_error for Mode::fp32, which is not sliced.
const SliceProducts &slice_products(Mode mode);

/// Writes the slices of the `size` values at `values`, as the hardware rounds them, to
/// `slices[0]` ... `slices[slice_products(mode).slices - 1]`. Their sum, each divided
/// by its scale, is the value to within the precision of the mode; Inf and NaN go to slice 0.
void split(Mode mode, const float *values, int64_t size, float *const *slices);

} // namespace metatomic_tc
