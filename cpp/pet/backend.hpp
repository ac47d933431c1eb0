#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/script.h>

namespace metatomic_tc {

/// A `FlatPETBackend` of python/metatomic_tc/pet/backend.py in an exported model. Its TorchScript
/// is frozen in the user's file, so all that C++ calls and reads of it stands here, and belongs to
/// a numbered interface:
///
/// 0. files without a number: `energy_targets`, `energy_scales`, `uncertainty_matrix`,
///    `species_to_species_index`, `num_layers`, `feedforward`, `edges_of_system`,
///    `calculate_features`, `first_features`, `layer`, `energies_of_features`
/// 1. also `energies_of_edges`
///
/// N is the number of atoms, P that of pairs and E that of edges. Lengths are in Å and energies in
/// eV. "Floating point" is the model's type, `dtype()`; everything is on its `device()`.
class PetBackend {
  public:
    /// The latest interface that is driven here; so are all before it.
    static constexpr int64_t latest_interface = 1;

    /// What `edges_of_system` makes and the other methods read: named tensors, of which C++ uses
    /// `edge_vectors` [E, 3] in Å and `edge_cutoff_factors` [E], both floating point.
    using BatchData = c10::impl::GenericDict;
    static constexpr auto edge_vectors = "edge_vectors";
    static constexpr auto edge_cutoff_factors = "edge_cutoff_factors";

    /// The one in `model`, if it has one.
    static std::optional<PetBackend> find(const torch::jit::Module &model);

    /// Why it cannot be driven here, or "" if it can. Then all below may be used.
    std::string why_not() const;

    /// Targets that are energies in eV.
    std::vector<std::string> energy_targets() const;
    /// Whether the uncertainties of the target "energy" are known.
    bool has_uncertainty() const;
    int64_t num_layers() const;
    /// Whether only the features of the last layer go to the heads; else those of each layer do.
    bool feedforward() const;
    at::Device device() const;
    at::ScalarType dtype() const;
    /// [atomic types], int64: -1 for those that the model does not know
    at::Tensor species_to_species_index() const;
    std::vector<at::Tensor> parameters_and_buffers() const;

    /// @param positions [N, 3], floating point
    /// @param cell [3, 3], floating point, rows are the cell vectors
    /// @param neighbors [P], int32, in rows by their centre, in both directions
    /// @param cell_shifts [P, 3], int32
    /// @param row_starts [N + 1], int32
    /// @param species [N], int32, atomic types
    /// @param capacity of edges; negative: exactly as many as there are
    /// @return the edges; and [2], int32: their number, which may be more than the capacity, and
    ///     the number of pairs without a reverse
    std::pair<BatchData, at::Tensor> edges_of_system(
        const at::Tensor &positions,
        const at::Tensor &cell,
        const at::Tensor &neighbors,
        const at::Tensor &cell_shifts,
        const at::Tensor &row_starts,
        const at::Tensor &species,
        int64_t capacity
    );

    struct Energies {
        /// [N], FP64
        at::Tensor energies;
        /// [N], or [0] if not wanted, without gradients
        at::Tensor uncertainties;
    };

    /// All that follows from the edges, in one pass.
    ///
    /// @param cell [3, 3], floating point
    /// @param target one of `energy_targets`
    Energies energies_of_edges(
        const BatchData &batch_data,
        const at::Tensor &cell,
        const std::string &target,
        bool uncertainty
    );

    /// The same in parts: these in front of the first layer,
    struct Features {
        /// [N, d_node], floating point
        at::Tensor nodes;
        /// [E, d], floating point
        at::Tensor messages;
    };
    Features first_features(const BatchData &batch_data);

    /// then each layer,
    struct LayerOutputs {
        /// [N, d_node] and [E, d], floating point: also what the heads get of the layers that
        /// `feedforward` says
        at::Tensor nodes, edges;
        /// [E, d], floating point
        at::Tensor messages;
    };
    LayerOutputs layer(int64_t index, const Features &features, const BatchData &batch_data);

    /// and the heads, on `nodes` and `edges` of the layers that `feedforward` says.
    Energies energies_of_features(
        const c10::List<at::Tensor> &nodes,
        const c10::List<at::Tensor> &edges,
        const BatchData &batch_data,
        const at::Tensor &cell,
        const std::string &target,
        bool uncertainty
    );

  private:
    explicit PetBackend(torch::jit::Module module);

    torch::jit::Module module;
    int64_t interface = 0;
};

} // namespace metatomic_tc
