#include "operators.hpp"

#include <ATen/Dispatch.h>

#include "pet/arguments.hpp"
#include "pet/gradients.hpp"
#include "pet/kernels/edges.hpp"
#include "rows/run.hpp"

namespace metatomic_tc {

namespace {

using at::Tensor;
using rows::output;
using rows::pointer;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Pairs or edges, checked.
struct PairTensors {
    Tensor positions, cells, neighbors, cell_shifts, row_starts, system_indices;

    PairTensors(
        const pet::Arguments &arguments,
        const Tensor &positions,
        const Tensor &cells,
        const Tensor &neighbors,
        const Tensor &cell_shifts,
        const Tensor &row_starts,
        const Tensor &system_indices
    )
        : positions(arguments.values(positions, "positions", {-1, 3})),
          cells(arguments.values(cells, "cells", {-1, 3, 3})),
          neighbors(arguments.indices(neighbors, "neighbors", {-1}, positions.size(0))),
          cell_shifts(arguments.integers(cell_shifts, "cell_shifts", {neighbors.numel(), 3})),
          row_starts(arguments.row_starts(row_starts, positions.size(0), neighbors.numel())),
          system_indices(arguments.indices(
              system_indices, "system_indices", {positions.size(0)}, cells.size(0)
          )) {}

    explicit PairTensors(const variable_list &saved)
        : positions(saved[0]), cells(saved[1]), neighbors(saved[2]), cell_shifts(saved[3]),
          row_starts(saved[4]), system_indices(saved[5]) {}

    variable_list list() const {
        return {positions, cells, neighbors, cell_shifts, row_starts, system_indices};
    }

    template <class T> pet::Pairs<T> pairs() const {
        return {
            .positions = pointer<T>(positions),
            .cells = pointer<T>(cells),
            .neighbors = pointer<int>(neighbors),
            .cell_shifts = pointer<int>(cell_shifts),
            .row_starts = pointer<int>(row_starts),
            .system_indices = pointer<int>(system_indices)
        };
    }

    int64_t atoms() const {
        return positions.size(0);
    }
};

/// The sums of [atoms, 9] over the atoms of each system, as [systems, 3, 3].
Tensor sum_of_systems(const Tensor &values, const Tensor &system_indices, int64_t systems) {
    if (systems == 1) {
        return values.sum(0).view({1, 3, 3});
    }
    auto sums = at::empty({systems, 3, 3}, values.options());
    AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "pet_system_sums", [&] {
        rows::run(
            pet::SystemSums<scalar_t>{
                .values = pointer<scalar_t>(values),
                .system_indices = pointer<int>(system_indices),
                .atoms = values.size(0),
                .sums = output<scalar_t>(sums)
            },
            systems,
            values
        );
    });
    return sums;
}

/// Makes the gradients of positions and cells the first two of `result`: `compute(grad_positions,
/// grad_cells)` fills [atoms, 3] and [atoms, 9], of which the latter are summed over systems.
template <class Compute>
void geometry_gradients(
    AutogradContext *context, const PairTensors &pairs, variable_list &result, Compute compute
) {
    auto grad_positions = at::empty_like(pairs.positions);
    auto grad_cells = at::empty({pairs.atoms(), 9}, pairs.positions.options());
    compute(grad_positions, grad_cells);
    result[0] = grad_positions;
    if (context->needs_input_grad(1)) {
        result[1] = sum_of_systems(grad_cells, pairs.system_indices, pairs.cells.size(0));
    }
}

struct AdaptiveCutoffs : public torch::autograd::Function<AdaptiveCutoffs> {
    static constexpr auto name = "pet_adaptive_cutoffs";

    static Tensor forward(
        AutogradContext *context,
        const Tensor &positions,
        const Tensor &cells,
        const Tensor &neighbors,
        const Tensor &cell_shifts,
        const Tensor &row_starts,
        const Tensor &system_indices,
        double num_neighbors,
        double max_cutoff,
        double width
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, positions);
        auto pairs = PairTensors(
            arguments, positions, cells, neighbors, cell_shifts, row_starts, system_indices
        );
        auto options = positions.options();
        auto distances = at::empty({neighbors.numel()}, options);
        auto cutoffs = at::empty({pairs.atoms()}, options);
        auto roots = at::empty({pairs.atoms()}, options);
        auto responses = at::empty({pairs.atoms()}, options);
        AT_DISPATCH_FLOATING_TYPES(positions.scalar_type(), name, [&] {
            rows::run(
                pet::AdaptiveCutoffs<scalar_t>{
                    .pairs = pairs.pairs<scalar_t>(),
                    .cutoff = {.width = static_cast<scalar_t>(width), .bump = true},
                    .num_neighbors = static_cast<scalar_t>(num_neighbors),
                    .max_cutoff = static_cast<scalar_t>(max_cutoff),
                    .distances = output<scalar_t>(distances),
                    .cutoffs = output<scalar_t>(cutoffs),
                    .roots = output<scalar_t>(roots),
                    .responses = output<scalar_t>(responses)
                },
                pairs.atoms(),
                positions
            );
        });
        auto saved = pairs.list();
        saved.push_back(roots);
        saved.push_back(responses);
        context->save_for_backward(saved);
        context->saved_data["width"] = width;
        return cutoffs;
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 9, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto pairs = PairTensors(saved);
            auto gradient = gradients[0];
            auto compute = [&](const Tensor &grad_positions, const Tensor &grad_cells) {
                AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                    auto width = static_cast<scalar_t>(context->saved_data["width"].toDouble());
                    rows::run(
                        pet::AdaptiveCutoffsBackward<scalar_t>{
                            .pairs = pairs.pairs<scalar_t>(),
                            .cutoff = {.width = width, .bump = true},
                            .roots = pointer<scalar_t>(saved[6]),
                            .responses = pointer<scalar_t>(saved[7]),
                            .gradient = pointer<scalar_t>(gradient),
                            .grad_positions = output<scalar_t>(grad_positions),
                            .grad_cells = output<scalar_t>(grad_cells)
                        },
                        pairs.atoms(),
                        gradient
                    );
                });
            };
            geometry_gradients(context, pairs, result, compute);
        });
    }
};

struct EdgeVectors : public torch::autograd::Function<EdgeVectors> {
    static constexpr auto name = "pet_edge_vectors";

    static Tensor forward(
        AutogradContext *context,
        const Tensor &positions,
        const Tensor &cells,
        const Tensor &neighbors,
        const Tensor &cell_shifts,
        const Tensor &row_starts,
        const Tensor &reverse,
        const Tensor &system_indices
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, positions);
        auto edges = PairTensors(
            arguments, positions, cells, neighbors, cell_shifts, row_starts, system_indices
        );
        auto count = neighbors.numel();
        auto reverse_indices = arguments.indices(reverse, "reverse", {count}, count);
        auto vectors = at::zeros({count, 3}, positions.options());
        AT_DISPATCH_FLOATING_TYPES(positions.scalar_type(), name, [&] {
            rows::run(
                pet::EdgeVectors<scalar_t>{
                    .edges = edges.pairs<scalar_t>(), .vectors = output<scalar_t>(vectors)
                },
                edges.atoms(),
                positions
            );
        });
        auto saved = edges.list();
        saved.push_back(reverse_indices);
        context->save_for_backward(saved);
        return vectors;
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 7, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto edges = PairTensors(saved);
            auto gradient = gradients[0];
            auto compute = [&](const Tensor &grad_positions, const Tensor &grad_cells) {
                AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                    rows::run(
                        pet::EdgeVectorsBackward<scalar_t>{
                            .cell_shifts = pointer<int>(edges.cell_shifts),
                            .row_starts = pointer<int>(edges.row_starts),
                            .reverse = pointer<int>(saved[6]),
                            .gradient = pointer<scalar_t>(gradient),
                            .grad_positions = output<scalar_t>(grad_positions),
                            .grad_cells = output<scalar_t>(grad_cells)
                        },
                        edges.atoms(),
                        gradient
                    );
                });
            };
            geometry_gradients(context, edges, result, compute);
        });
    }
};

struct CutoffFactors : public torch::autograd::Function<CutoffFactors> {
    static constexpr auto name = "pet_cutoff_factors";

    static Tensor forward(
        AutogradContext *context,
        const Tensor &vectors,
        const Tensor &atomic_cutoffs,
        const Tensor &neighbors,
        const Tensor &row_starts,
        const Tensor &reverse,
        double width,
        bool bump
    ) {
        auto below_autograd = at::AutoDispatchBelowADInplaceOrView();
        auto arguments = pet::Arguments(name, vectors);
        auto edges = vectors.size(0), atoms = atomic_cutoffs.size(0);
        auto saved = variable_list{
            arguments.values(vectors, "vectors", {-1, 3}),
            arguments.values(atomic_cutoffs, "atomic_cutoffs", {-1}),
            arguments.indices(neighbors, "neighbors", {edges}, atoms),
            arguments.row_starts(row_starts, atoms, edges),
            arguments.indices(reverse, "reverse", {edges}, edges),
        };
        auto factors = at::zeros({edges}, vectors.options());
        AT_DISPATCH_FLOATING_TYPES(vectors.scalar_type(), name, [&] {
            rows::run(
                pet::CutoffFactors<scalar_t>{
                    .cutoff = {.width = static_cast<scalar_t>(width), .bump = bump},
                    .vectors = pointer<scalar_t>(saved[0]),
                    .cutoffs = pointer<scalar_t>(saved[1]),
                    .neighbors = pointer<int>(saved[2]),
                    .row_starts = pointer<int>(saved[3]),
                    .factors = output<scalar_t>(factors)
                },
                atoms,
                vectors
            );
        });
        context->save_for_backward(saved);
        context->saved_data["width"] = width;
        context->saved_data["bump"] = bump;
        return factors;
    }

    static variable_list backward(AutogradContext *context, variable_list upper) {
        return pet::gradients_of(name, 7, upper, [&](const auto &gradients, auto &result) {
            auto saved = context->get_saved_variables();
            auto gradient = gradients[0];
            result[0] = at::zeros_like(saved[0]);
            result[1] = at::empty_like(saved[1]);
            AT_DISPATCH_FLOATING_TYPES(gradient.scalar_type(), name, [&] {
                auto width = static_cast<scalar_t>(context->saved_data["width"].toDouble());
                rows::run(
                    pet::CutoffFactorsBackward<scalar_t>{
                        .cutoff = {.width = width, .bump = context->saved_data["bump"].toBool()},
                        .vectors = pointer<scalar_t>(saved[0]),
                        .cutoffs = pointer<scalar_t>(saved[1]),
                        .neighbors = pointer<int>(saved[2]),
                        .row_starts = pointer<int>(saved[3]),
                        .reverse = pointer<int>(saved[4]),
                        .gradient = pointer<scalar_t>(gradient),
                        .grad_vectors = output<scalar_t>(result[0]),
                        .grad_cutoffs = output<scalar_t>(result[1])
                    },
                    saved[1].size(0),
                    gradient
                );
            });
        });
    }
};

} // namespace

std::tuple<Tensor, Tensor, Tensor> pet_sort_by_center(
    const Tensor &centers, const Tensor &neighbors, const Tensor &cell_shifts, int64_t num_atoms
) {
    auto [sorted, order] = at::sort(centers.to(at::kInt), /*stable=*/true, 0, false);
    auto atoms = at::arange(num_atoms + 1, sorted.options());
    return {
        neighbors.to(at::kInt).index_select(0, order),
        cell_shifts.to(at::kInt).index_select(0, order),
        at::searchsorted(sorted, atoms, /*out_int32=*/true)
    };
}

Tensor pet_adaptive_cutoffs(
    const Tensor &positions,
    const Tensor &cells,
    const Tensor &neighbors,
    const Tensor &cell_shifts,
    const Tensor &row_starts,
    const Tensor &system_indices,
    double num_neighbors,
    double max_cutoff,
    double width
) {
    return AdaptiveCutoffs::apply(
        positions,
        cells,
        neighbors,
        cell_shifts,
        row_starts,
        system_indices,
        num_neighbors,
        max_cutoff,
        width
    );
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pet_select_edges(
    const Tensor &positions,
    const Tensor &cells,
    const Tensor &neighbors,
    const Tensor &cell_shifts,
    const Tensor &row_starts,
    const Tensor &system_indices,
    const Tensor &atomic_cutoffs,
    int64_t capacity
) {
    auto no_gradient = at::NoGradGuard();
    auto arguments = pet::Arguments("pet_select_edges", positions);
    auto pairs = PairTensors(
        arguments, positions, cells, neighbors, cell_shifts, row_starts, system_indices
    );
    auto cutoffs = arguments.values(atomic_cutoffs, "atomic_cutoffs", {pairs.atoms()});
    auto counts = at::empty({pairs.atoms()}, row_starts.options());
    auto edge_starts = at::zeros({pairs.atoms() + 1}, row_starts.options());
    auto edge_neighbors = Tensor(), edge_shifts = Tensor(), number = Tensor();
    AT_DISPATCH_FLOATING_TYPES(positions.scalar_type(), "pet_select_edges", [&] {
        auto select = pet::SelectEdges<scalar_t>{
            .pairs = pairs.pairs<scalar_t>(),
            .cutoffs = pointer<scalar_t>(cutoffs),
            .counts = output<int>(counts)
        };
        rows::run(select, pairs.atoms(), positions);
        auto ends = edge_starts.narrow(0, 1, pairs.atoms());
        at::cumsum_out(ends, counts, 0, at::kInt);
        number = edge_starts.narrow(0, pairs.atoms(), 1).clone();
        auto edges = capacity;
        if (capacity < 0) {
            edges = number.item<int>();
        } else {
            edge_starts.clamp_max_(capacity);
        }
        edge_neighbors = at::zeros({edges}, counts.options());
        edge_shifts = at::zeros({edges, 3}, counts.options());
        select.edge_starts = pointer<int>(edge_starts);
        select.neighbors = output<int>(edge_neighbors);
        select.cell_shifts = output<int>(edge_shifts);
        rows::run(select, pairs.atoms(), positions);
    });
    return {edge_neighbors, edge_shifts, edge_starts, number};
}

Tensor
pet_reverse_edges(const Tensor &neighbors, const Tensor &cell_shifts, const Tensor &row_starts) {
    for (const auto &[tensor, what] :
         {std::pair(&neighbors, "neighbors"),
          std::pair(&cell_shifts, "cell_shifts"),
          std::pair(&row_starts, "row_starts")}) {
        TORCH_CHECK_VALUE(
            tensor->scalar_type() == at::kInt && tensor->device() == neighbors.device(),
            "metatomic_tc::pet_reverse_edges needs '",
            what,
            "' as an int32 tensor on ",
            neighbors.device(),
            ", but found a ",
            tensor->scalar_type(),
            " tensor on ",
            tensor->device(),
            "."
        );
    }
    TORCH_CHECK_VALUE(
        neighbors.dim() == 1 && cell_shifts.sizes() == at::IntArrayRef({neighbors.numel(), 3}) &&
            row_starts.dim() == 1 && row_starts.numel() > 0,
        "metatomic_tc::pet_reverse_edges needs neighbors [edges], cell_shifts [edges, 3] and "
        "row_starts [atoms + 1], but found the sizes ",
        neighbors.sizes(),
        ", ",
        cell_shifts.sizes(),
        " and ",
        row_starts.sizes(),
        "."
    );
    auto guard = c10::DeviceGuard(neighbors.device());
    auto contiguous =
        std::array{neighbors.contiguous(), cell_shifts.contiguous(), row_starts.contiguous()};
    auto name = "pet_reverse_edges";
    pet::expect_indices(name, "neighbors", contiguous[0], row_starts.numel() - 1, false);
    pet::expect_indices(name, "row_starts", contiguous[2], neighbors.numel() + 1, true);
    auto reverse = at::arange(neighbors.numel(), contiguous[0].options());
    rows::run(
        pet::ReverseEdges{
            .neighbors = pointer<int>(contiguous[0]),
            .cell_shifts = pointer<int>(contiguous[1]),
            .row_starts = pointer<int>(contiguous[2]),
            .reverse = output<int>(reverse)
        },
        row_starts.numel() - 1,
        neighbors
    );
    return reverse;
}

Tensor pet_edge_vectors(
    const Tensor &positions,
    const Tensor &cells,
    const Tensor &neighbors,
    const Tensor &cell_shifts,
    const Tensor &row_starts,
    const Tensor &reverse,
    const Tensor &system_indices
) {
    return EdgeVectors::apply(
        positions, cells, neighbors, cell_shifts, row_starts, reverse, system_indices
    );
}

Tensor pet_cutoff_factors(
    const Tensor &vectors,
    const Tensor &atomic_cutoffs,
    const Tensor &neighbors,
    const Tensor &row_starts,
    const Tensor &reverse,
    double width,
    bool bump
) {
    return CutoffFactors::apply(
        vectors, atomic_cutoffs, neighbors, row_starts, reverse, width, bump
    );
}

} // namespace metatomic_tc
