#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/ATen.h>

#include "metatomic_tc/gemm.hpp"

/// The operators' kernels per device, without autograd. Arguments as in metatomic_tc/linear.hpp.
namespace metatomic_tc {

at::Tensor linear_cpu(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string mode
);
at::Tensor linear_cuda(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string mode
);
at::Tensor linear_meta(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string mode
);
at::Tensor linear_autograd(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string mode
);

at::Tensor linear_input_gradient_cpu(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);
at::Tensor linear_input_gradient_cuda(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);
at::Tensor linear_input_gradient_meta(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);
at::Tensor linear_input_gradient_autograd(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);

at::Tensor linear_activation_cpu(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);
at::Tensor linear_activation_cuda(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);
at::Tensor linear_activation_meta(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);
at::Tensor linear_activation_autograd(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);

std::tuple<at::Tensor, at::Tensor> linear_activation_forward_cpu(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);
std::tuple<at::Tensor, at::Tensor> linear_activation_forward_cuda(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);
std::tuple<at::Tensor, at::Tensor> linear_activation_forward_meta(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);
std::tuple<at::Tensor, at::Tensor> linear_activation_forward_autograd(
    const at::Tensor &input,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    std::string activation,
    std::string mode
);

// ---- what the kernels of these operators share ----

/// Whether the product is `rows · weightᵀ` (a forward) or `rows · weight` (an input gradient).
enum class Direction { forward, input_gradient };

/// A product after its activation, and before it where that was asked for.
struct Activated {
    at::Tensor output;
    at::Tensor pre_activation;
};

/// Checks the arguments of a forward.
/// @throws c10::Error
void check_linear(
    const at::Tensor &input, const at::Tensor &weight, const std::optional<at::Tensor> &bias
);

/// The product on the CPU.
at::Tensor cpu_product(
    const at::Tensor &rows,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    Direction direction,
    const std::string &mode_name
);

/// The product and its activation on a CUDA device: in one pass where the kernel can do that.
Activated cuda_product(
    const at::Tensor &rows,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    Direction direction,
    const std::string &mode_name,
    Activation activation = Activation::none,
    bool keep_pre_activation = false
);

/// An uninitialized tensor like the result of the product.
at::Tensor meta_product(const at::Tensor &rows, const at::Tensor &weight, Direction direction);

/// `activation` of a product by PyTorch. Where `product` is not kept, it may be overwritten.
Activated activate(const at::Tensor &product, Activation activation, bool keep_pre_activation);

} // namespace metatomic_tc
