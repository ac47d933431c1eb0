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

/// The operator `metatomic_tc::glu_backward`: what `aten::glu_backward` does with the last
/// dimension, faster on a GPU, and without a derivative of its own.
at::Tensor glu_backward_cpu(const at::Tensor &gradient, const at::Tensor &product);
at::Tensor glu_backward_cuda(const at::Tensor &gradient, const at::Tensor &product);
at::Tensor glu_backward_meta(const at::Tensor &gradient, const at::Tensor &product);

/// The operator `metatomic_tc::gemm`, for benchmarks: `a · bᵀ + bias` with `transpose_b`, else
/// `a · b + bias`, by the implementation of this name, whatever the dispatch table says.
///
/// @param a [M,K], float32 on a CUDA device
/// @param b [N,K] with `transpose_b`, else [K,N]
/// @param bias [N] or none
/// @param tile_n, splits see `Gemm`
/// @return [M,N]
/// @throws c10::Error on other dtypes, shapes or devices, an unknown implementation, or one that
///         does not run on CUDA devices
at::Tensor gemm_cuda(
    const at::Tensor &a,
    const at::Tensor &b,
    const std::optional<at::Tensor> &bias,
    bool transpose_b,
    std::string implementation,
    int64_t tile_n,
    int64_t splits
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

/// The product by one implementation on the current CUDA device, into `result`. `rows` has two
/// dimensions, `pre_activation` may be undefined; for `tile_n` and `splits` see `Gemm`.
void cuda_gemm(
    Implementation implementation,
    const at::Tensor &rows,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    Direction direction,
    Activation activation,
    const at::Tensor &result,
    const at::Tensor &pre_activation,
    int64_t tile_n = 0,
    int64_t splits = 0
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
