#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/ATen.h>

#include "metatomic_tc/hardware.hpp"

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

/// A linear layer with the activation that follows it, the operator
/// `metatomic_tc::linear_activation`, differentiable twice. With z = `input · weightᵀ + bias`,
/// `silu` is z · sigmoid(z), and `swiglu` is v · sigmoid(g) for the halves v, g = z.chunk(2, -1).
///
/// The mode holds for the gradient with respect to the input too; activations and their gradients
/// are computed in FP32. What the gradient needs is kept only where there will be one.
///
/// @param activation `silu` or `swiglu`
/// @return [..., out_features], or [..., out_features / 2] with `swiglu`; contiguous
/// @throws c10::Error as `linear`, on an unknown activation, and on an odd number of output
///         features with `swiglu`
at::Tensor linear_activation(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    const std::string &activation,
    const std::string &mode
);

/// `linear_activation` together with z, which its gradient needs: the operator
/// `metatomic_tc::linear_activation_forward`.
///
/// @return output as of `linear_activation`, and z, [..., out_features]
std::tuple<at::Tensor, at::Tensor> linear_activation_forward(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    const std::string &activation,
    const std::string &mode
);

/// What `device` is, as far as the choice of a kernel depends on it.
/// @throws std::runtime_error for devices other than the CPU and CUDA.
Hardware hardware(c10::Device device);

} // namespace metatomic_tc
