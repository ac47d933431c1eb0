#pragma once

#include <optional>
#include <string>

#include <ATen/ATen.h>

#include "metatomic_tc/dispatch.hpp"

namespace metatomic_tc {

/// `input · weightᵀ + bias`, the operator `metatomic_tc::linear`, differentiable twice.
///
/// @param input [..., in_features], float32 or float64 (which computes in FP64 whatever the mode)
/// @param weight [out_features, in_features], dtype and device of `input`
/// @param bias [out_features] or none
/// @param mode see `parse_mode`
/// @return [..., out_features], contiguous
/// @throws c10::Error on other dtypes, shapes that do not match, an unknown mode, or a mode the
///         device does not support
at::Tensor linear(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    const std::string &mode
);

/// `grad_output · weight`, the operator `metatomic_tc::linear_input_gradient`: the gradient of
/// `linear` with respect to its input, itself differentiable.
///
/// @param grad_output [..., out_features]
/// @param weight [out_features, in_features]
/// @return [..., in_features], contiguous
at::Tensor linear_input_gradient(
    const at::Tensor &grad_output, const at::Tensor &weight, const std::string &mode
);

/// `device` as the dispatch table sees it.
/// @throws std::runtime_error for devices other than the CPU and CUDA.
Hardware hardware(c10::Device device);

} // namespace metatomic_tc
