#include "linear_kernels.hpp"

#include "metatomic_tc/linear.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

namespace metatomic_tc {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// The gradient of a weight [N,K] from rows [..., N] and [..., K], in plain PyTorch.
Tensor weight_gradient(const Tensor &out_rows, const Tensor &in_rows) {
    return out_rows.flatten(0, -2).t().mm(in_rows.flatten(0, -2));
}

Tensor at_least_2d(const Tensor &rows) {
    return rows.dim() == 1 ? rows.unsqueeze(0) : rows;
}

/// Y = X·Wᵀ + b
struct Linear : public torch::autograd::Function<Linear> {
    static Tensor forward(
        AutogradContext *context,
        const Tensor &input,
        const Tensor &weight,
        const std::optional<Tensor> &bias,
        std::string mode
    ) {
        auto guard = at::AutoDispatchBelowADInplaceOrView();
        // frozen weights never need the input again, which is most of a model's memory
        auto weight_needs_gradient = weight.requires_grad();
        context->save_for_backward({weight_needs_gradient ? input : Tensor(), weight});
        context->saved_data["mode"] = mode;
        context->saved_data["bias"] = bias.has_value() && bias->defined() && bias->requires_grad();
        return linear(input, weight, bias, mode);
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        auto saved = context->get_saved_variables();
        const auto &input = saved[0], &weight = saved[1];
        auto mode = context->saved_data["mode"].toStringRef();
        const auto &gradient = gradients[0];
        auto result = variable_list(4);
        if (!gradient.defined()) {
            return result;
        }
        if (context->needs_input_grad(0)) {
            result[0] = linear_input_gradient(gradient, weight, mode);
        }
        if (input.defined()) {
            result[1] = weight_gradient(at_least_2d(gradient), at_least_2d(input));
        }
        if (context->saved_data["bias"].toBool()) {
            result[2] = at_least_2d(gradient).flatten(0, -2).sum(0);
        }
        return result;
    }
};

/// dX = dY·W
struct LinearInputGradient : public torch::autograd::Function<LinearInputGradient> {
    static Tensor forward(
        AutogradContext *context, const Tensor &grad_output, const Tensor &weight, std::string mode
    ) {
        auto guard = at::AutoDispatchBelowADInplaceOrView();
        context->save_for_backward({weight.requires_grad() ? grad_output : Tensor(), weight});
        context->saved_data["mode"] = mode;
        return linear_input_gradient(grad_output, weight, mode);
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        auto saved = context->get_saved_variables();
        const auto &grad_output = saved[0], &weight = saved[1];
        auto mode = context->saved_data["mode"].toStringRef();
        const auto &gradient = gradients[0];
        auto result = variable_list(3);
        if (!gradient.defined()) {
            return result;
        }
        if (context->needs_input_grad(0)) {
            result[0] = linear(gradient, weight, std::nullopt, mode);
        }
        if (grad_output.defined()) {
            result[1] = weight_gradient(at_least_2d(grad_output), at_least_2d(gradient));
        }
        return result;
    }
};

} // namespace

Tensor linear(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    const std::string &mode
) {
    static auto operation =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("metatomic_tc::linear", "")
            .typed<Tensor(
                const Tensor &, const Tensor &, const std::optional<Tensor> &, std::string
            )>();
    return operation.call(input, weight, bias, mode);
}

Tensor
linear_input_gradient(const Tensor &grad_output, const Tensor &weight, const std::string &mode) {
    static auto operation = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("metatomic_tc::linear_input_gradient", "")
                                .typed<Tensor(const Tensor &, const Tensor &, std::string)>();
    return operation.call(grad_output, weight, mode);
}

Tensor linear_autograd(
    const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias, std::string mode
) {
    return Linear::apply(input, weight, bias, mode);
}

Tensor
linear_input_gradient_autograd(const Tensor &grad_output, const Tensor &weight, std::string mode) {
    return LinearInputGradient::apply(grad_output, weight, mode);
}

} // namespace metatomic_tc
