#pragma once

#include "attention.hpp"

namespace metatomic_tc::pet {

/// As `launch_attention`, with products by 3xTF32 on Tensor Cores. For heads of 16 or 32 columns,
/// and data aligned to 16 bytes, from compute capability 8.0 on. `log_sums` are logarithms to base
/// 2 here, so that forward and backward go together.
/// @throws std::runtime_error if CUDA fails, or this build has no CUDA kernels
void launch_attention_tf32x3(const Attention<float> &attention, void *stream);
void launch_attention_tf32x3(const AttentionBackward<float> &attention, void *stream);

} // namespace metatomic_tc::pet
