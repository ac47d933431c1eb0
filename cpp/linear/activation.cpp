#include "operators.hpp"

#include <ATen/Dispatch.h>

#include "kernels/glu_backward.hpp"
#include "metatomic_tc/linear.hpp"
#include "rows/run.hpp"

namespace metatomic_tc {

namespace {

using at::Tensor;

Activation parse_activation(const std::string &name) {
    TORCH_CHECK_VALUE(
        name == "silu" || name == "swiglu",
        "metatomic_tc::linear_activation computes the activations silu and swiglu, but found '",
        name,
        "'."
    );
    return name == "silu" ? Activation::silu : Activation::swiglu;
}

Activation check_linear_activation(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    const std::string &activation_name
) {
    check_linear(input, weight, bias);
    auto activation = parse_activation(activation_name);
    TORCH_CHECK_VALUE(
        activation != Activation::swiglu || weight.sym_size(0) % 2 == 0,
        "metatomic_tc::linear_activation needs an even number of output features with swiglu, a "
        "value and a gate for each column of its result, but found a weight of shape ",
        weight.sym_sizes(),
        "."
    );
    return activation;
}

Activated forward_device(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    const std::string &activation_name,
    const std::string &mode,
    bool keep_pre_activation
) {
    auto activation = check_linear_activation(input, weight, bias, activation_name);
    return product(input, weight, bias, Direction::forward, mode, activation, keep_pre_activation);
}

Activated forward_meta(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    const std::string &activation_name,
    const std::string &mode
) {
    auto activation = check_linear_activation(input, weight, bias, activation_name);
    parse_mode(mode);
    auto product = meta_product(input, weight, Direction::forward);
    auto shape = product.sym_sizes().vec();
    if (activation == Activation::swiglu) {
        shape.back() = shape.back() / 2;
    }
    return {at::empty_symint(shape, product.options()), product};
}

} // namespace

Tensor linear_activation_device(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    std::string activation,
    std::string mode
) {
    return forward_device(input, weight, bias, activation, mode, false).output;
}

Tensor linear_activation_meta(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    std::string activation,
    std::string mode
) {
    return forward_meta(input, weight, bias, activation, mode).output;
}

std::tuple<Tensor, Tensor> linear_activation_forward_device(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    std::string activation,
    std::string mode
) {
    auto result = forward_device(input, weight, bias, activation, mode, true);
    return {result.output, result.pre_activation};
}

std::tuple<Tensor, Tensor> linear_activation_forward_meta(
    const Tensor &input,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    std::string activation,
    std::string mode
) {
    auto result = forward_meta(input, weight, bias, activation, mode);
    return {result.output, result.pre_activation};
}

namespace {

void check_glu(const Tensor &gradient, const Tensor &product) {
    auto dtype = product.scalar_type();
    TORCH_CHECK_TYPE(
        (dtype == at::kFloat || dtype == at::kDouble) && gradient.scalar_type() == dtype,
        "metatomic_tc::glu_backward takes two float32 or float64 tensors, but found ",
        gradient.scalar_type(),
        " and ",
        dtype,
        "."
    );
    auto expected = gradient.sizes().vec();
    if (!expected.empty()) {
        expected.back() *= 2;
    }
    TORCH_CHECK_VALUE(
        gradient.dim() > 0 && product.sizes() == expected && product.device() == gradient.device(),
        "metatomic_tc::glu_backward needs a product with the sizes of the gradient, the last one "
        "doubled, on the same device, but found the sizes ",
        gradient.sizes(),
        " on ",
        gradient.device(),
        " and ",
        product.sizes(),
        " on ",
        product.device(),
        "."
    );
}

} // namespace

Tensor glu_backward_device(const Tensor &gradient, const Tensor &product) {
    check_glu(gradient, product);
    if (product.is_cpu()) {
        return at::glu_backward(gradient, product, -1);
    }
    auto guard = c10::DeviceGuard(product.device());
    auto upper = gradient.contiguous(), values = product.contiguous();
    auto result = at::empty_like(values);
    auto width = upper.size(-1);
    AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "metatomic_tc::glu_backward", [&] {
        auto backward = GluBackward<scalar_t>{
            .gradient = rows::pointer<scalar_t>(upper),
            .product = rows::pointer<scalar_t>(values),
            .width = static_cast<int>(width),
            .output = rows::output<scalar_t>(result)
        };
        rows::run(backward, width == 0 ? 0 : upper.numel() / width, values);
    });
    return result;
}

Tensor glu_backward_meta(const Tensor &, const Tensor &product) {
    return at::empty_like(product, at::MemoryFormat::Contiguous);
}

} // namespace metatomic_tc
