#include "operators.hpp"

#include <ATen/Dispatch.h>

#include "pet/arguments.hpp"
#include "pet/gradients.hpp"
#include "pet/kernels/tokens.hpp"
#include "pet/spare_rows.hpp"
#include "rows/run.hpp"

namespace metatomic_tc {

namespace {

using at::Tensor;
using pet::NormKind;
using rows::output;
using rows::pointer;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// From what operators take.
NormKind norm_kind(bool layer_norm) {
    return layer_norm ? NormKind::layer : NormKind::rms;
}

/// The parameters of a norm, checked, and how they travel to the backward.
struct NormTensors {
    Tensor weight, bias;
    double epsilon;
    NormKind kind;

    NormTensors(
        const pet::Arguments &arguments,
        int64_t width,
        const Tensor &weight,
        const std::optional<Tensor> &bias,
        double epsilon,
        NormKind kind
    )
        : weight(arguments.values(weight, "weight", {width})), epsilon(epsilon), kind(kind) {
        TORCH_CHECK_VALUE(
            kind == NormKind::layer || !(bias.has_value() && bias->defined()),
            "metatomic_tc's RMSNorm has no 'bias', but found one; give none, or layer_norm=True."
        );
        if (bias.has_value() && bias->defined()) {
            this->bias = arguments.values(*bias, "bias", {width});
        }
    }

    NormTensors(const Tensor &weight, AutogradContext *context)
        : weight(weight), epsilon(context->saved_data["epsilon"].toDouble()),
          kind(norm_kind(context->saved_data["layer_norm"].toBool())) {}

    void save(AutogradContext *context) const {
        context->saved_data["epsilon"] = epsilon;
        context->saved_data["layer_norm"] = kind == NormKind::layer;
    }

    template <class T> pet::Norm<T> norm() const {
        return {
            .weight = pointer<T>(weight),
            .bias = pointer<T>(bias),
            .epsilon = static_cast<T>(epsilon),
            .kind = kind,
            .width = static_cast<int>(weight.numel())
        };
    }
};

void expect_frozen_norm(const char *name, const Tensor &weight, const std::optional<Tensor> &bias) {
    pet::expect_frozen(name, "weight", weight);
    pet::expect_frozen(name, "bias", bias);
}

/// What uses `edges` besides takes the second output, so that its gradient is added in the backward
/// instead of a pass over both.
struct ConcatenatedNorm : public torch::autograd::Function<ConcatenatedNorm> {
    static constexpr auto name = "pet_concatenated_norm";

    static variable_list forward(
        AutogradContext *context,
        const Tensor &nodes,
        const Tensor &edges,
        const Tensor &weight,
        const std::optional<Tensor> &bias,
        double epsilon,
        NormKind kind
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, nodes);
        auto first = arguments.values(nodes, "nodes", {-1, -1});
        auto width = first.size(1);
        auto second = arguments.values(edges, "edges", {-1, width});
        auto norm = NormTensors(arguments, width, weight, bias, epsilon, kind);
        auto rows = first.size(0) + second.size(0);
        auto result = at::empty({rows, width}, nodes.options());
        AT_DISPATCH_FLOATING_TYPES(nodes.scalar_type(), name, [&] {
            rows::run(
                pet::ConcatenatedNorm<scalar_t>{
                    .norm = norm.norm<scalar_t>(),
                    .first = pointer<scalar_t>(first),
                    .second = pointer<scalar_t>(second),
                    .first_rows = first.size(0),
                    .output = output<scalar_t>(result)
                },
                rows,
                nodes
            );
        });
        context->save_for_backward({first, second, norm.weight});
        norm.save(context);
        context->set_materialize_grads(false);
        return {result, edges};
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 6, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto norm = NormTensors(saved[2], context);
            auto rows = saved[0].size(0) + saved[1].size(0);
            auto width = saved[0].size(1);
            auto gradient = pet::or_zeros(gradients[0], {rows, width}, saved[0].options());
            auto direct = gradients[1];
            result[0] = at::empty_like(saved[0]);
            result[1] = at::empty_like(saved[1]);
            AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                rows::run(
                    pet::ConcatenatedNormBackward<scalar_t>{
                        .norm = norm.norm<scalar_t>(),
                        .first = pointer<scalar_t>(saved[0]),
                        .second = pointer<scalar_t>(saved[1]),
                        .first_rows = saved[0].size(0),
                        .gradient = pointer<scalar_t>(gradient),
                        .grad_direct = pointer<scalar_t>(direct),
                        .grad_first = output<scalar_t>(result[0]),
                        .grad_second = output<scalar_t>(result[1])
                    },
                    rows,
                    gradient
                );
            });
        });
    }
};

struct ResidualNorm : public torch::autograd::Function<ResidualNorm> {
    static constexpr auto name = "pet_residual_norm";

    static variable_list forward(
        AutogradContext *context,
        const Tensor &tokens,
        const Tensor &edges,
        const Tensor &weight,
        const std::optional<Tensor> &bias,
        double epsilon,
        NormKind kind
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, tokens);
        auto token_rows = arguments.values(tokens, "tokens", {-1, -1});
        auto width = token_rows.size(1);
        auto edge_rows = arguments.values(edges, "edges", {-1, width});
        auto node_count = token_rows.size(0) - edge_rows.size(0);
        TORCH_CHECK_VALUE(
            node_count >= 0,
            "metatomic_tc::",
            name,
            " needs 'tokens' with the rows of 'edges' and "
            "before them those of nodes, but found ",
            token_rows.size(0),
            " and ",
            edge_rows.size(0),
            " rows."
        );
        auto norm = NormTensors(arguments, width, weight, bias, epsilon, kind);
        auto nodes = at::empty({node_count, width}, tokens.options());
        auto sums = at::empty_like(edge_rows), normed = at::empty_like(edge_rows);
        AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), name, [&] {
            rows::run(
                pet::ResidualNorm<scalar_t>{
                    .norm = norm.norm<scalar_t>(),
                    .tokens = pointer<scalar_t>(token_rows),
                    .edges = pointer<scalar_t>(edge_rows),
                    .node_rows = node_count,
                    .nodes = output<scalar_t>(nodes),
                    .sums = output<scalar_t>(sums),
                    .normed = output<scalar_t>(normed)
                },
                token_rows.size(0),
                tokens
            );
        });
        context->save_for_backward({sums, norm.weight});
        norm.save(context);
        context->saved_data["nodes"] = node_count;
        context->set_materialize_grads(false);
        return {nodes, sums, normed};
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 6, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto sums = saved[0];
            auto norm = NormTensors(saved[1], context);
            auto nodes = context->saved_data["nodes"].toInt();
            auto grad_nodes = gradients[0], grad_sums = gradients[1], grad_normed = gradients[2];
            auto grad_tokens = at::empty({nodes + sums.size(0), sums.size(1)}, sums.options());
            AT_DISPATCH_FLOATING_TYPES(sums.scalar_type(), name, [&] {
                rows::run(
                    pet::ResidualNormBackward<scalar_t>{
                        .norm = norm.norm<scalar_t>(),
                        .sums = pointer<scalar_t>(sums),
                        .node_rows = nodes,
                        .grad_nodes = pointer<scalar_t>(grad_nodes),
                        .grad_sums = pointer<scalar_t>(grad_sums),
                        .grad_normed = pointer<scalar_t>(grad_normed),
                        .grad_tokens = output<scalar_t>(grad_tokens)
                    },
                    grad_tokens.size(0),
                    sums
                );
            });
            result[0] = grad_tokens;
            result[1] = grad_tokens.narrow(0, nodes, sums.size(0));
        });
    }
};

/// The second output is as that of `ConcatenatedNorm`.
struct ReversedPairNorm : public torch::autograd::Function<ReversedPairNorm> {
    static constexpr auto name = "pet_reversed_pair_norm";

    static variable_list forward(
        AutogradContext *context,
        const Tensor &x,
        const Tensor &reverse,
        const Tensor &weight,
        const Tensor &bias,
        double epsilon
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, x);
        auto values = arguments.values(x, "x", {-1, -1});
        auto indices = arguments.indices(reverse, "reverse", {values.size(0)}, values.size(0));
        auto width = 2 * values.size(1);
        auto norm = NormTensors(arguments, width, weight, bias, epsilon, NormKind::layer);
        auto result = at::empty({values.size(0), width}, x.options());
        AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), name, [&] {
            rows::run(
                pet::ReversedPairNorm<scalar_t>{
                    .norm = norm.norm<scalar_t>(),
                    .values = pointer<scalar_t>(values),
                    .reverse = pointer<int>(indices),
                    .output = output<scalar_t>(result)
                },
                values.size(0),
                x
            );
        });
        context->save_for_backward({values, indices, norm.weight});
        norm.save(context);
        context->set_materialize_grads(false);
        return {result, x};
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 5, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto norm = NormTensors(saved[2], context);
            auto rows = saved[0].size(0);
            auto width = 2 * saved[0].size(1);
            auto gradient = pet::or_zeros(gradients[0], {rows, width}, saved[0].options());
            auto direct = gradients[1];
            result[0] = at::empty_like(saved[0]);
            AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                rows::run(
                    pet::ReversedPairNormBackward<scalar_t>{
                        .norm = norm.norm<scalar_t>(),
                        .values = pointer<scalar_t>(saved[0]),
                        .reverse = pointer<int>(saved[1]),
                        .gradient = pointer<scalar_t>(gradient),
                        .grad_direct = pointer<scalar_t>(direct),
                        .grad_values = output<scalar_t>(result[0])
                    },
                    rows,
                    gradient
                );
            });
        });
    }
};

struct EdgeTokens : public torch::autograd::Function<EdgeTokens> {
    static constexpr auto name = "pet_edge_tokens";

    template <class T> static pet::EdgeTokens<T> tokens(const variable_list &tensors) {
        return {
            .messages = pointer<T>(tensors[0]),
            .vectors = pointer<T>(tensors[1]),
            .geometry_weight = pointer<T>(tensors[2]),
            .neighbor_table = pointer<T>(tensors[3]),
            .neighbor_species = pointer<int>(tensors[4]),
            .width = static_cast<int>(tensors[2].size(0)),
            .output = nullptr
        };
    }

    static Tensor forward(
        AutogradContext *context,
        const std::optional<Tensor> &messages,
        const Tensor &vectors,
        const Tensor &geometry_weight,
        const Tensor &neighbor_table,
        const Tensor &neighbor_species
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, vectors);
        auto edges = vectors.size(0);
        auto width = geometry_weight.size(0);
        auto has_messages = messages.has_value() && messages->defined();
        auto saved = variable_list{
            has_messages ? arguments.values(*messages, "messages", {edges, width}) : Tensor(),
            arguments.values(vectors, "vectors", {-1, 3}),
            arguments.values(geometry_weight, "geometry_weight", {-1, 4}),
            arguments.values(neighbor_table, "neighbor_table", {-1, width}),
            arguments.indices(
                neighbor_species, "neighbor_species", {edges}, neighbor_table.size(0)
            ),
        };
        auto result = at::empty({edges, width}, vectors.options());
        AT_DISPATCH_FLOATING_TYPES(vectors.scalar_type(), name, [&] {
            auto rows = tokens<scalar_t>(saved);
            rows.output = output<scalar_t>(result);
            rows::run(rows, edges, vectors);
        });
        context->save_for_backward(saved);
        return result;
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 5, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto gradient = gradients[0];
            if (saved[0].defined()) {
                result[0] = at::empty_like(saved[0]);
            }
            result[1] = at::empty_like(saved[1]);
            AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                rows::run(
                    pet::EdgeTokensBackward<scalar_t>{
                        .tokens = tokens<scalar_t>(saved),
                        .gradient = pointer<scalar_t>(gradient),
                        .grad_messages = output<scalar_t>(result[0]),
                        .grad_vectors = output<scalar_t>(result[1])
                    },
                    gradient.size(0),
                    gradient
                );
            });
        });
    }
};

struct SegmentSum : public torch::autograd::Function<SegmentSum> {
    static constexpr auto name = "pet_segment_sum";

    static Tensor forward(
        AutogradContext *context,
        const Tensor &values,
        const Tensor &factors,
        const Tensor &row_starts
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, values);
        auto saved = variable_list{
            arguments.values(values, "values", {-1, -1}),
            arguments.values(factors, "factors", {values.size(0)}),
            arguments.row_starts(row_starts, row_starts.numel() - 1, values.size(0)),
        };
        auto atoms = row_starts.numel() - 1;
        auto sums = at::empty({atoms, values.size(1)}, values.options());
        AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), name, [&] {
            rows::run(
                pet::SegmentSum<scalar_t>{
                    .values = pointer<scalar_t>(saved[0]),
                    .factors = pointer<scalar_t>(saved[1]),
                    .row_starts = pointer<int>(saved[2]),
                    .width = static_cast<int>(values.size(1)),
                    .sums = output<scalar_t>(sums)
                },
                atoms,
                values
            );
        });
        context->save_for_backward(saved);
        return sums;
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 3, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto gradient = gradients[0];
            result[0] = at::empty_like(saved[0]);
            result[1] = at::zeros_like(saved[1]);
            AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                pet::clear_spare_rows<scalar_t>(result[0], saved[2], 0);
                rows::run(
                    pet::SegmentSumBackward<scalar_t>{
                        .values = pointer<scalar_t>(saved[0]),
                        .factors = pointer<scalar_t>(saved[1]),
                        .row_starts = pointer<int>(saved[2]),
                        .width = static_cast<int>(gradient.size(1)),
                        .gradient = pointer<scalar_t>(gradient),
                        .grad_values = output<scalar_t>(result[0]),
                        .grad_factors = output<scalar_t>(result[1])
                    },
                    gradient.size(0),
                    gradient
                );
            });
        });
    }
};

struct AverageReversed : public torch::autograd::Function<AverageReversed> {
    static constexpr auto name = "pet_average_reversed";

    static Tensor average(const Tensor &first, const Tensor &second, const Tensor &reverse) {
        auto result = at::empty_like(second);
        AT_DISPATCH_FLOATING_TYPES(second.scalar_type(), name, [&] {
            rows::run(
                pet::AverageReversed<scalar_t>{
                    .first = pointer<scalar_t>(first),
                    .second = pointer<scalar_t>(second),
                    .reverse = pointer<int>(reverse),
                    .width = static_cast<int>(second.size(1)),
                    .output = output<scalar_t>(result)
                },
                second.size(0),
                second
            );
        });
        return result;
    }

    static Tensor
    forward(AutogradContext *context, const Tensor &x, const Tensor &y, const Tensor &reverse) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, x);
        auto first = arguments.values(x, "x", {-1, -1});
        auto second = arguments.values(y, "y", {first.size(0), first.size(1)});
        auto indices = arguments.indices(reverse, "reverse", {first.size(0)}, first.size(0));
        context->save_for_backward({indices});
        return average(first, second, indices);
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        auto gradients = pet::Gradients(name, upper);
        if (gradients.none()) {
            return variable_list(3);
        }
        // the reverse of the reverse is the edge itself, so the gradient is a gather as well
        auto gradient = gradients[0];
        return {
            gradient * 0.5, average(Tensor(), gradient, context->get_saved_variables()[0]), Tensor()
        };
    }
};

struct Sum : public torch::autograd::Function<Sum> {
    static constexpr auto name = "pet_sum";

    static Tensor
    forward(AutogradContext *context, const Tensor &x, const Tensor &y, const Tensor &z) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, x);
        auto first = arguments.values(x, "x", {-1, -1});
        auto second = arguments.values(y, "y", {first.size(0), first.size(1)});
        auto third = arguments.values(z, "z", {first.size(0), first.size(1)});
        auto result = at::empty_like(first);
        AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), name, [&] {
            rows::run(
                pet::Sum<scalar_t>{
                    .first = pointer<scalar_t>(first),
                    .second = pointer<scalar_t>(second),
                    .third = pointer<scalar_t>(third),
                    .width = static_cast<int>(first.size(1)),
                    .output = output<scalar_t>(result)
                },
                first.size(0),
                x
            );
        });
        return result;
    }

    static variable_list backward(AutogradContext *, variable_list upper) {
        auto gradients = pet::Gradients(name, upper);
        return variable_list(3, upper[0]);
    }
};

} // namespace

Tensor pet_sum(const Tensor &x, const Tensor &y, const Tensor &z) {
    return Sum::apply(x, y, z);
}

Tensor pet_edge_tokens(
    const std::optional<Tensor> &messages,
    const Tensor &vectors,
    const Tensor &geometry_weight,
    const Tensor &neighbor_table,
    const Tensor &neighbor_species
) {
    pet::expect_frozen(EdgeTokens::name, "geometry_weight", geometry_weight);
    pet::expect_frozen(EdgeTokens::name, "neighbor_table", neighbor_table);
    return EdgeTokens::apply(messages, vectors, geometry_weight, neighbor_table, neighbor_species);
}

Tensor pet_norm(
    const Tensor &x,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    double epsilon,
    bool layer_norm
) {
    expect_frozen_norm("pet_norm", weight, bias);
    TORCH_CHECK_VALUE(
        x.dim() == 2,
        "metatomic_tc::pet_norm needs 'x' with two dimensions, but found the sizes ",
        x.sizes(),
        "."
    );
    auto none = at::empty({0, x.size(1)}, x.options());
    return ConcatenatedNorm::apply(x, none, weight, bias, epsilon, norm_kind(layer_norm))[0];
}

std::tuple<Tensor, Tensor> pet_concatenated_norm(
    const Tensor &nodes,
    const Tensor &edges,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    double epsilon,
    bool layer_norm
) {
    expect_frozen_norm(ConcatenatedNorm::name, weight, bias);
    auto result =
        ConcatenatedNorm::apply(nodes, edges, weight, bias, epsilon, norm_kind(layer_norm));
    return {result[0], result[1]};
}

std::tuple<Tensor, Tensor, Tensor> pet_residual_norm(
    const Tensor &tokens,
    const Tensor &edges,
    const Tensor &weight,
    const std::optional<Tensor> &bias,
    double epsilon,
    bool layer_norm
) {
    expect_frozen_norm(ResidualNorm::name, weight, bias);
    auto result = ResidualNorm::apply(tokens, edges, weight, bias, epsilon, norm_kind(layer_norm));
    return {result[0], result[1], result[2]};
}

std::tuple<Tensor, Tensor> pet_reversed_pair_norm(
    const Tensor &x, const Tensor &reverse, const Tensor &weight, const Tensor &bias, double epsilon
) {
    expect_frozen_norm(ReversedPairNorm::name, weight, bias);
    auto result = ReversedPairNorm::apply(x, reverse, weight, bias, epsilon);
    return {result[0], result[1]};
}

Tensor pet_segment_sum(const Tensor &values, const Tensor &factors, const Tensor &row_starts) {
    return SegmentSum::apply(values, factors, row_starts);
}

Tensor pet_average_reversed(const Tensor &x, const Tensor &y, const Tensor &reverse) {
    return AverageReversed::apply(x, y, reverse);
}

} // namespace metatomic_tc
