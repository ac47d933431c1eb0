#pragma once

#include <string>
#include <vector>

namespace metatomic_tc {

/// How the FP32 operands of a linear layer are multiplied. Inputs and outputs are FP32 in every
/// mode.
enum class Mode {
    /// IEEE FP32, one product: the reference.
    fp32,
    /// One TF32 product: 2⁻¹¹ relative error per operand, for comparison only.
    tf32,
    /// Two TF32 slices per operand and the products hi·hi + hi·lo + lo·hi.
    tf32x3,
    /// Three BF16 slices per operand and all nine products. On the GPU cuBLAS uses it where it
    /// expects a gain and native FP32 elsewhere (its strategy "performant").
    bf16x9,
    /// bf16x9 wherever cuBLAS supports it (its strategy "eager").
    bf16x9_eager,
};

/// All modes, in the order of the documentation.
const std::vector<Mode> &all_modes();

/// The name users write: `fp32`, `tf32`, `tf32x3`, `bf16x9` or `bf16x9-eager`.
std::string to_string(Mode mode);

/// The mode called `name`.
/// @throws std::invalid_argument naming `name` and the valid modes.
Mode parse_mode(const std::string &name);

} // namespace metatomic_tc
