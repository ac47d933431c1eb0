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
    /// Two FP16 slices per operand and the same three products (Ootomo and Yokota,
    /// arXiv:2203.03341), of operands scaled by powers of two: each row of the input (or of the
    /// output's gradient) by one for every 32 columns, the weight by one for each output. The low
    /// slice is scaled by another 2¹¹. A number more than 2²⁷ times smaller than the largest that
    /// shares its power has fewer bits than in FP32: the largest becomes at least 2¹⁴, and the low
    /// slice is rounded to multiples of 2⁻²⁴·2⁻¹¹ at best, with an error of up to 2⁻⁵⁰ of the
    /// largest. The missing product lo·lo makes that 2⁻⁴⁹, and of two such small numbers it may be
    /// 2⁻⁷⁸ of the product of the two largest.
    fp16x3,
    /// The three BF16 slices of bf16x9 and the six largest of its products (Henry, Tang and
    /// Heinecke, arXiv:1904.06376).
    bf16x6,
    /// Three BF16 slices per operand and all nine products (same source). On compute
    /// capability 10.0 and 10.3 cuBLAS uses it where it expects a gain and native FP32 elsewhere
    /// (its strategy "performant").
    bf16x9,
    /// bf16x9 wherever cuBLAS of compute capability 10.0 and 10.3 supports it (its strategy
    /// "eager").
    bf16x9_eager,
};

/// All modes, in the order of the documentation.
const std::vector<Mode> &all_modes();

/// The name users write: `fp32`, `tf32`, `tf32x3`, `fp16x3`, `bf16x6`, `bf16x9` or
/// `bf16x9-eager`.
std::string to_string(Mode mode);

/// The mode called `name`.
/// @throws std::invalid_argument naming `name` and the valid modes.
Mode parse_mode(const std::string &name);

} // namespace metatomic_tc
