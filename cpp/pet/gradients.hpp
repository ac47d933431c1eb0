#pragma once

#include <optional>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

/// What the backward passes of the PET backend's operators share.
namespace metatomic_tc::pet {

/// The gradients of an operator's outputs in its backward, which cannot be differentiated again.
class Gradients {
  public:
    Gradients(const char *name, const torch::autograd::variable_list &gradients)
        : gradients(gradients) {
        TORCH_CHECK(
            !at::GradMode::is_enabled(),
            "metatomic_tc::",
            name,
            " has no second derivative, but its gradient was asked for with "
            "create_graph=True; use the stock backend for that."
        );
        for (const auto &gradient : gradients) {
            if (gradient.defined()) {
                guard.emplace(gradient.device());
            }
        }
    }

    /// Whether all are zero.
    bool none() const {
        return !guard.has_value();
    }

    /// Undefined for zeros.
    at::Tensor operator[](size_t i) const {
        return gradients[i].defined() ? gradients[i].contiguous() : at::Tensor();
    }

  private:
    const torch::autograd::variable_list &gradients;
    std::optional<c10::DeviceGuard> guard;
};

/// What the backward of an operator with so many arguments returns: `compute(gradients, result)`
/// fills it, unless all gradients are zero.
template <class Compute>
torch::autograd::variable_list gradients_of(
    const char *name, size_t arguments, const torch::autograd::variable_list &upper, Compute compute
) {
    auto gradients = Gradients(name, upper);
    auto result = torch::autograd::variable_list(arguments);
    if (!gradients.none()) {
        compute(gradients, result);
    }
    return result;
}

/// A gradient that the kernels must find, zeros if there is none.
inline at::Tensor
or_zeros(const at::Tensor &gradient, at::IntArrayRef sizes, const at::TensorOptions &options) {
    return gradient.defined() ? gradient : at::zeros(sizes, options);
}

} // namespace metatomic_tc::pet
