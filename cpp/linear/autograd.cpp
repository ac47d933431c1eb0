#include "operators.hpp"

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

/// The gradients of X, W and b from that of X·Wᵀ + b. `input` is undefined where W needs none.
variable_list linear_gradients(
    const AutogradContext *context,
    const Tensor &gradient,
    const Tensor &input,
    const Tensor &weight,
    const std::string &mode
) {
    auto result = variable_list(3);
    if (context->needs_input_grad(0)) {
        result[0] = linear_input_gradient(gradient, weight, mode);
    }
    if (input.defined()) {
        result[1] = weight_gradient(at_least_2d(gradient), at_least_2d(input));
    }
    if (context->saved_data.at("bias").toBool()) {
        result[2] = at_least_2d(gradient).flatten(0, -2).sum(0);
    }
    return result;
}

bool requires_grad(const std::optional<Tensor> &bias) {
    return bias.has_value() && bias->defined() && bias->requires_grad();
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
        context->saved_data["bias"] = requires_grad(bias);
        return linear(input, weight, bias, mode);
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        auto saved = context->get_saved_variables();
        auto mode = context->saved_data["mode"].toStringRef();
        const auto &gradient = gradients[0];
        auto result = variable_list(4);
        if (gradient.defined()) {
            result = linear_gradients(context, gradient, saved[0], saved[1], mode);
            result.resize(4);
        }
        return result;
    }
};

/// The gradient of Z from that of Z · sigmoid(Z).
Tensor silu_gradient(const Tensor &gradient, const Tensor &product) {
    if (!at::GradMode::is_enabled()) {
        return at::silu_backward(gradient, product);
    }
    // PyTorch's operator, unlike that of glu, cannot be differentiated
    auto sigmoid = product.sigmoid();
    return gradient * sigmoid * (1 + product * (1 - sigmoid));
}

/// The gradient of Z = [values, gates] from that of values · sigmoid(gates).
Tensor glu_gradient(const Tensor &gradient, const Tensor &product) {
    if (at::GradMode::is_enabled()) {
        return at::glu_backward(gradient, product, -1);
    }
    static auto operation = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("metatomic_tc::glu_backward", "")
                                .typed<Tensor(const Tensor &, const Tensor &)>();
    return operation.call(gradient, product);
}

/// Y = activation(Z) and Z = X·Wᵀ + b. Z is an output, since the second derivatives reach X, W and
/// b through it too.
struct LinearActivation : public torch::autograd::Function<LinearActivation> {
    static variable_list forward(
        AutogradContext *context,
        const Tensor &input,
        const Tensor &weight,
        const std::optional<Tensor> &bias,
        std::string activation,
        std::string mode
    ) {
        auto guard = at::AutoDispatchBelowADInplaceOrView();
        auto [output, product] = linear_activation_forward(input, weight, bias, activation, mode);
        context->save_for_backward({weight.requires_grad() ? input : Tensor(), weight, product});
        context->saved_data["activation"] = activation;
        context->saved_data["mode"] = mode;
        context->saved_data["bias"] = requires_grad(bias);
        // Z has a gradient in the second derivative only
        context->set_materialize_grads(false);
        return {output, product};
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        auto saved = context->get_saved_variables();
        auto mode = context->saved_data["mode"].toStringRef();
        auto gradient = gradients[1];
        if (gradients[0].defined()) {
            auto through_output = context->saved_data["activation"].toStringRef() == "silu"
                                      ? silu_gradient(gradients[0], saved[2])
                                      : glu_gradient(gradients[0], saved[2]);
            gradient = gradient.defined() ? gradient + through_output : through_output;
        }
        auto result = variable_list(5);
        if (gradient.defined()) {
            result = linear_gradients(context, gradient, saved[0], saved[1], mode);
            result.resize(5);
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

Tensor linear_activation(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    const std::string &activation,
    const std::string &mode
) {
    static auto operation = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("metatomic_tc::linear_activation", "")
                                .typed<Tensor(
                                    const Tensor &,
                                    const Tensor &,
                                    const std::optional<Tensor> &,
                                    std::string,
                                    std::string
                                )>();
    return operation.call(input, weight, bias, activation, mode);
}

std::tuple<Tensor, Tensor> linear_activation_forward(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    const std::string &activation,
    const std::string &mode
) {
    static auto operation = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("metatomic_tc::linear_activation_forward", "")
                                .typed<std::tuple<Tensor, Tensor>(
                                    const Tensor &,
                                    const Tensor &,
                                    const std::optional<Tensor> &,
                                    std::string,
                                    std::string
                                )>();
    return operation.call(input, weight, bias, activation, mode);
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

Tensor linear_activation_autograd(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    std::string activation,
    std::string mode
) {
    if (at::GradMode::is_enabled() &&
        (input.requires_grad() || weight.requires_grad() || requires_grad(bias))) {
        return LinearActivation::apply(input, weight, bias, activation, mode)[0];
    }
    auto guard = at::AutoDispatchBelowADInplaceOrView();
    return linear_activation(input, weight, bias, activation, mode);
}

std::tuple<Tensor, Tensor> linear_activation_forward_autograd(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    std::string activation,
    std::string mode
) {
    auto result = LinearActivation::apply(input, weight, bias, activation, mode);
    return {result[0], result[1]};
}

} // namespace metatomic_tc
