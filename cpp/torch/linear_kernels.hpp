#pragma once

#include <optional>
#include <string>

#include <ATen/ATen.h>

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

} // namespace metatomic_tc
