#include "operators.hpp"

#include <ATen/Dispatch.h>

#include "metatomic_tc/linear.hpp"
#include "pet/arguments.hpp"
#include "pet/gradients.hpp"
#include "pet/kernels/attention_cpu.hpp"
#include "pet/kernels/attention_tf32x3.hpp"
#include "pet/spare_rows.hpp"
#include "product/plan.hpp"
#include "rows/run.hpp"

namespace metatomic_tc {

namespace {

using at::Tensor;
using rows::output;
using rows::pointer;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Attention : public torch::autograd::Function<Attention> {
    static constexpr auto name = "pet_attention";

    /// @param tensors qkv, factors, row starts, output, logarithms of the softmax's denominators
    template <class T>
    static pet::Attention<T> attention(const variable_list &tensors, int64_t heads, double scale) {
        return {
            .qkv = pointer<T>(tensors[0]),
            .factors = pointer<T>(tensors[1]),
            .row_starts = pointer<int>(tensors[2]),
            .atoms = tensors[2].numel() - 1,
            .heads = static_cast<int>(heads),
            .head_size = static_cast<int>(tensors[3].size(1) / heads),
            .scale = static_cast<T>(scale),
            .output = output<T>(tensors[3]),
            .log_sums = output<T>(tensors[4])
        };
    }

    template <template <class> class Problem, class T>
    static void launch(const Problem<T> &problem, AttentionKernel kernel, void *stream) {
        if constexpr (std::is_same_v<T, float>) {
            if (kernel == AttentionKernel::cuda_tf32x3) {
                pet::launch_attention_tf32x3(problem, stream);
                return;
            }
        }
        pet::launch_attention(problem, stream);
    }

    static Tensor forward(
        AutogradContext *context,
        const Tensor &qkv,
        const Tensor &cutoff_factors,
        const Tensor &row_starts,
        int64_t num_heads,
        double scale,
        const std::string &mode
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, qkv);
        auto factors = arguments.values(cutoff_factors, "cutoff_factors", {-1});
        auto starts = arguments.row_starts(row_starts, row_starts.numel() - 1, factors.numel());
        auto rows = starts.numel() - 1 + factors.numel();
        auto tokens = arguments.values(qkv, "qkv", {rows, -1});
        auto width = tokens.size(1) / 3;
        TORCH_CHECK_VALUE(
            num_heads > 0 && width > 0 && tokens.size(1) == 3 * width && width % num_heads == 0,
            "metatomic_tc::",
            name,
            " needs 'qkv' with 3 · heads · (head size) columns, but found ",
            tokens.size(1),
            " columns for ",
            num_heads,
            " heads."
        );
        TORCH_CHECK_VALUE(
            tokens.is_cpu() || width / num_heads <= pet::largest_head_size,
            "metatomic_tc::",
            name,
            " has kernels for heads of up to ",
            pet::largest_head_size,
            " columns on a GPU, but found ",
            width / num_heads,
            "; use the stock backend for this model."
        );
        auto kernel = attention_kernel(
            parse_mode(mode),
            hardware(tokens.device()),
            width / num_heads,
            tokens.scalar_type() == at::kFloat
        );
        tokens = rows::aligned(tokens);
        auto result = at::empty({rows, width}, tokens.options());
        auto log_sums = at::empty({rows, num_heads}, tokens.options());
        auto saved = variable_list{tokens, factors, starts, result, log_sums};
        AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), name, [&] {
            auto problem = attention<scalar_t>(saved, num_heads, scale);
            pet::clear_spare_rows<scalar_t>(result, starts, problem.atoms);
            if (kernel != AttentionKernel::cpu) {
                launch(problem, kernel, stream_of(tokens));
            } else {
                auto work = [&](int64_t begin, int64_t end) {
                    for (auto atom = begin; atom < end; atom++) {
                        pet::attend(problem, atom);
                    }
                };
                rows::run_on_cpu(work, problem.atoms, 1);
            }
        });
        context->save_for_backward(saved);
        context->saved_data["heads"] = num_heads;
        context->saved_data["scale"] = scale;
        context->saved_data["kernel"] = static_cast<int64_t>(kernel);
        return result;
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 6, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto heads = context->saved_data["heads"].toInt();
            auto scale = context->saved_data["scale"].toDouble();
            auto kernel = static_cast<AttentionKernel>(context->saved_data["kernel"].toInt());
            auto gradient = rows::aligned(gradients[0]);
            auto grad_qkv = at::empty_like(saved[0]);
            auto products = at::empty_like(saved[4]), grad_log_factors = at::zeros_like(saved[4]);
            AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                pet::clear_spare_rows<scalar_t>(grad_qkv, saved[2], saved[2].numel() - 1);
                auto problem = pet::AttentionBackward<scalar_t>{
                    .forward = attention<scalar_t>(saved, heads, scale),
                    .gradient = pointer<scalar_t>(gradient),
                    .products = output<scalar_t>(products),
                    .grad_qkv = output<scalar_t>(grad_qkv),
                    .grad_log_factors = output<scalar_t>(grad_log_factors)
                };
                if (kernel != AttentionKernel::cpu) {
                    launch(problem, kernel, stream_of(gradient));
                } else {
                    auto work = [&](int64_t begin, int64_t end) {
                        for (auto atom = begin; atom < end; atom++) {
                            pet::attend_backward(problem, atom);
                        }
                    };
                    rows::run_on_cpu(work, problem.forward.atoms, 1);
                }
            });
            result[0] = grad_qkv;
            if (context->needs_input_grad(1)) {
                const auto &factors = saved[1];
                auto atoms = saved[2].numel() - 1;
                auto sums = grad_log_factors.narrow(0, atoms, factors.numel()).sum(1);
                result[1] = at::where(
                    factors < pet::smallest_factor, at::zeros_like(factors), sums / factors
                );
            }
        });
    }
};

} // namespace

Tensor pet_attention(
    const Tensor &qkv,
    const Tensor &cutoff_factors,
    const Tensor &row_starts,
    int64_t num_heads,
    double scale,
    const std::string &mode
) {
    return Attention::apply(qkv, cutoff_factors, row_starts, num_heads, scale, mode);
}

} // namespace metatomic_tc
