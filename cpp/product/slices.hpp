#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "metatomic_tc/modes.hpp"

namespace metatomic_tc {

enum class SliceFormat { tf32, bf16, fp16 };

/// How a mode multiplies: the slices of each operand and the products of slices, in bands of equal
/// scale from the smallest to the largest. `{i, j}` is slice i of the input times slice j of the
/// weight; slice 0 is the largest.
///
/// Two slices of TF32 are those of CUTLASS; of FP16, those of Ootomo and Yokota (arXiv:2203.03341),
/// who scale the smaller one; here the operands are scaled, too. Three slices of BF16 with six or
/// nine products are those of Henry, Tang and Heinecke (arXiv:1904.06376).
struct SliceProducts {
    SliceFormat format;
    int slices;
    /// Slice i is kept as scale^i times its value, so that the slices of tiny numbers are not
    /// subnormal; the product of slices i and j is therefore scale^(i+j) times its value.
    float scale;
    std::vector<std::vector<std::pair<int, int>>> bands;
    /// FP16 has few exponents, so its operands are scaled: every row of the input by a power of two
    /// for each chunk of this many columns, and the weight by one for each output. The products of
    /// a chunk are scaled back and added in FP32. 0 for formats that have the exponents of FP32.
    int64_t chunk = 0;
};

/// @throws std::logic_error for Mode::fp32, which is not sliced.
const SliceProducts &slice_products(Mode mode);

/// Writes the slices of the `size` values at `values`, as the hardware rounds them, to
/// `slices[0]` ... `slices[slice_products(mode).slices - 1]`, and returns a power of two. Their
/// sum, each divided by its scale, is the value divided by this power, to within the precision of
/// the mode; Inf and NaN go to slice 0.
///
/// The power is 1, except for FP16. There the largest magnitude of `values` is brought into
/// [2¹⁴, 2¹⁵), or multiplied by 2¹²⁶ where that is not enough: FP32 has the power and its inverse
/// as normal numbers.
float split(Mode mode, const float *values, int64_t size, float *const *slices);

} // namespace metatomic_tc
