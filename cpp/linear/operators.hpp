#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/ATen.h>

#include "product/gemm.hpp"

/// The operators without autograd, on the CPU and on CUDA devices, on tensors without data, and
/// with autograd. Arguments as in metatomic_tc/linear.hpp.
namespace metatomic_tc {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor linear_device(
    const at::Tensor &input, const at::Tensor &weight, const OptionalTensor &bias, std::string mode
);
at::Tensor linear_meta(
    const at::Tensor &input, const at::Tensor &weight, const OptionalTensor &bias, std::string mode
);
at::Tensor linear_autograd(
    const at::Tensor &input, const at::Tensor &weight, const OptionalTensor &bias, std::string mode
);

at::Tensor linear_input_gradient_device(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);
at::Tensor linear_input_gradient_meta(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);
at::Tensor linear_input_gradient_autograd(
    const at::Tensor &grad_output, const at::Tensor &weight, std::string mode
);

at::Tensor linear_activation_device(
    const at::Tensor &input,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    std::string activation,
    std::string mode
);
at::Tensor linear_activation_meta(
    const at::Tensor &input,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    std::string activation,
    std::string mode
);
at::Tensor linear_activation_autograd(
    const at::Tensor &input,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    std::string activation,
    std::string mode
);

std::tuple<at::Tensor, at::Tensor> linear_activation_forward_device(
    const at::Tensor &input,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    std::string activation,
    std::string mode
);
std::tuple<at::Tensor, at::Tensor> linear_activation_forward_meta(
    const at::Tensor &input,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    std::string activation,
    std::string mode
);
std::tuple<at::Tensor, at::Tensor> linear_activation_forward_autograd(
    const at::Tensor &input,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    std::string activation,
    std::string mode
);

/// The operator `metatomic_tc::glu_backward`: what `aten::glu_backward` does with the last
/// dimension, faster on a GPU, and without a derivative of its own.
at::Tensor glu_backward_device(const at::Tensor &gradient, const at::Tensor &product);
at::Tensor glu_backward_meta(const at::Tensor &gradient, const at::Tensor &product);

/// The operator `metatomic_tc::gemm`, for benchmarks and tests: `a · bᵀ + bias` with `transpose_b`,
/// else `a · b + bias`, by the kernel of this name, whatever the table of kernels says.
///
/// @param a [M,K], float32 on a CUDA device
/// @param b [N,K] with `transpose_b`, else [K,N]
/// @param bias [N] or none
/// @param kernel see `parse_kernel`
/// @param tile_n, splits see `plan_with`
/// @return [M,N]
/// @throws c10::Error on other dtypes, shapes or devices, an unknown kernel, or one that does not
///         run on CUDA devices
at::Tensor gemm_cuda(
    const at::Tensor &a,
    const at::Tensor &b,
    const OptionalTensor &bias,
    bool transpose_b,
    std::string kernel,
    int64_t tile_n,
    int64_t splits
);

// ---- what these operators share ----

/// A product after its activation, and before it where that was asked for.
struct Activated {
    at::Tensor output;
    at::Tensor pre_activation;
};

/// Checks the arguments of a forward.
/// @throws c10::Error
void check_linear(const at::Tensor &input, const at::Tensor &weight, const OptionalTensor &bias);

/// The product and its activation on the device of its operands: in one pass where the kernel can
/// do that.
Activated product(
    const at::Tensor &rows,
    const at::Tensor &weight,
    const OptionalTensor &bias,
    Direction direction,
    const std::string &mode,
    Activation activation = Activation::none,
    bool keep_pre_activation = false
);

/// The operands of a product on a CUDA device as kernels take them, without its result.
struct CudaOperands {
    /// which own what the pointers of `gemm` lead to
    at::Tensor rows, weight, bias;
    Gemm gemm;
    /// of the mode fp32
    Problem problem;

    /// @param rows [M,K], FP32
    CudaOperands(
        const at::Tensor &rows,
        const at::Tensor &weight,
        const OptionalTensor &bias,
        Direction direction
    );

    /// Computes the product as planned on the current device.
    /// @param result contiguous
    /// @param pre_activation may be undefined
    void run(const Plan &plan, const at::Tensor &result, const at::Tensor &pre_activation);
};

/// An uninitialized tensor like the result of the product.
at::Tensor meta_product(const at::Tensor &rows, const at::Tensor &weight, Direction direction);

} // namespace metatomic_tc
