#include "metatomic_tc/pet_step.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include "backend.hpp"
#include "cuda_graph.hpp"
#include "linear/packed_weights.hpp"
#include "operators.hpp"

namespace metatomic_tc {

using torch::autograd::variable_list;

namespace {

using BatchData = PetBackend::BatchData;

/// Usual room to spare, as a part of the arrays' rows, where there are graphs that need it.
constexpr double usual_spare = 0.005;

/// What a step leaves behind, in one FP64 tensor for room for so many atoms (rows), so that it
/// comes to the host in one piece.
struct StepResult {
    /// [rows]
    at::Tensor energies;
    /// [3 rows] and [9]: of the energy with respect to positions and strain
    at::Tensor position_gradient, strain_gradient;
    /// [2]: the number of edges and that of pairs without a reverse
    at::Tensor status;
    /// [rows], or [0] if they are not wanted
    at::Tensor uncertainties;

    static std::vector<int64_t> sizes(int64_t rows, bool uncertainty) {
        return {rows, 3 * rows, 9, 2, uncertainty ? rows : 0};
    }

    /// The parts of `all`, not copies.
    static StepResult in(const at::Tensor &all, int64_t rows, bool uncertainty) {
        auto parts = all.split_with_sizes(sizes(rows, uncertainty));
        return {parts[0], parts[1], parts[2], parts[3], parts[4]};
    }

    at::Tensor concatenated() const {
        return at::cat(
            {energies,
             position_gradient.reshape({-1}),
             strain_gradient.reshape({-1}),
             status.to(at::kDouble),
             uncertainties.to(at::kDouble)}
        );
    }
};

/// Gradients of `outputs`, zeros where there are none.
variable_list gradients_of(
    const variable_list &outputs, const variable_list &inputs, const variable_list &upper
) {
    auto differentiable = variable_list(), weights = variable_list();
    for (size_t i = 0; i < outputs.size(); i++) {
        if (outputs[i].requires_grad() && upper[i].defined()) {
            differentiable.push_back(outputs[i]);
            weights.push_back(upper[i]);
        }
    }
    auto found = variable_list(inputs.size());
    if (!differentiable.empty()) {
        found = torch::autograd::grad(
            differentiable,
            inputs,
            weights,
            /*retain_graph=*/std::nullopt,
            /*create_graph=*/false,
            /*allow_unused=*/true
        );
    }
    for (size_t i = 0; i < inputs.size(); i++) {
        found[i] = found[i].defined() ? found[i] : at::zeros_like(inputs[i]);
    }
    return found;
}

} // namespace

struct PetStep::Implementation {
    PetBackend backend;
    std::string energy;
    bool uncertainty;
    /// none: arrays are as large as they must be, and there is no graph
    std::optional<double> spare;
    at::Device device;
    at::ScalarType dtype;
    /// one that the model knows
    int64_t spare_species;
    int64_t num_layers;
    bool feedforward;
    bool lean = false;
    std::string graph_problem, capture_problem;
    int64_t captures = 0;
    int64_t graph_memory = 0, peak_memory = 0;

    /// Of the structure.
    int64_t atoms = -1, owned = 0;
    /// Room for edges; negative for as many as there are.
    int64_t edge_capacity = -1;
    /// What a step reads and writes, with room for more atoms and pairs. Species, neighbors, cell
    /// shifts and row starts are as `PetBackend::edges_of_system` takes them; weights, FP64, are
    /// 1 for owned atoms and 0 for others.
    at::Tensor positions, cell, species, weights, neighbors, cell_shifts, row_starts;
    /// a `StepResult`
    at::Tensor result;
    /// The model's, which nothing changes as long as it is used here.
    std::unique_ptr<PackedWeights> packed_weights;
    std::optional<CudaGraph> graph;

    Implementation(PetBackend found, const std::string &energy, bool uncertainty);
    void set_spare(std::optional<double> part);
    void set_structure(const at::Tensor &species, const at::Tensor &pairs, int64_t owned);
    int64_t with_room(int64_t size, int64_t least) const;
    void make_room(int64_t atoms, int64_t pairs);
    /// Drops the graph and the room for edges that it has.
    void invalidate();
    void step(int64_t capacity);
    void capture();
    /// The energies and uncertainties, and the gradients of the energies' weighted sum.
    std::pair<PetBackend::Energies, variable_list> pass_fast(
        const BatchData &batch_data, const at::Tensor &strained_cell, const variable_list &inputs
    );
    std::pair<PetBackend::Energies, variable_list> pass_lean(
        const BatchData &batch_data, const at::Tensor &strained_cell, const variable_list &inputs
    );
};

std::string
PetStep::why_not(const torch::jit::Module &model, const std::string &energy, bool uncertainty) {
    auto backend = PetBackend::find(model);
    if (!backend.has_value()) {
        return "the model is no PET with the backend of metatomic-tc (see metatomic-tc export)";
    }
    if (auto problem = backend->why_not(); !problem.empty()) {
        return problem;
    }
    auto targets = backend->energy_targets();
    if (std::find(targets.begin(), targets.end(), energy) == targets.end()) {
        return "the output " + energy +
               " of the model is no energy in eV, or has a repulsion (ZBL) added to it, or the "
               "model is not in angstrom";
    }
    if (uncertainty && !(backend->has_uncertainty() && energy == "energy")) {
        return "the uncertainty of the output " + energy + " is not known to the backend";
    }
    return "";
}

PetStep::PetStep(const torch::jit::Module &model, const std::string &energy, bool uncertainty) {
    auto problem = why_not(model, energy, uncertainty);
    TORCH_CHECK_VALUE(problem.empty(), "A step of PET cannot be made: ", problem, ".");
    implementation =
        std::make_unique<Implementation>(*PetBackend::find(model), energy, uncertainty);
    auto on_gpu = implementation->device.is_cuda();
    implementation->set_spare(on_gpu ? std::make_optional(usual_spare) : std::nullopt);
}

PetStep::PetStep(
    const torch::jit::Module &model, const std::string &energy, bool uncertainty, double spare
)
    : PetStep(model, energy, uncertainty) {
    implementation->set_spare(spare < 0 ? std::nullopt : std::make_optional(spare));
}

PetStep::Implementation::Implementation(
    PetBackend found, const std::string &energy, bool uncertainty
)
    : backend(std::move(found)), energy(energy), uncertainty(uncertainty), device(backend.device()),
      dtype(backend.dtype()),
      spare_species((backend.species_to_species_index() >= 0).nonzero()[0].item<int64_t>()),
      num_layers(backend.num_layers()), feedforward(backend.feedforward()),
      packed_weights(std::make_unique<PackedWeights>(backend.parameters_and_buffers())) {}

void PetStep::Implementation::set_spare(std::optional<double> part) {
    spare = part;
    if (!device.is_cuda()) {
        graph_problem = "there are none on the CPU";
    } else if (!spare.has_value()) {
        graph_problem = "the arrays have no room to spare";
    } else {
        graph_problem = CudaGraph::why_not();
    }
}

PetStep::~PetStep() = default;

void PetStep::set_structure(const at::Tensor &species, const at::Tensor &pairs, int64_t owned) {
    auto guard = c10::DeviceGuard(implementation->device);
    implementation->set_structure(species, pairs, owned);
}

void PetStep::Implementation::set_structure(
    const at::Tensor &all_species, const at::Tensor &all_pairs, int64_t owned_atoms
) {
    TORCH_CHECK_VALUE(
        all_species.dim() == 1 && all_pairs.dim() == 2 && all_pairs.size(1) == 5 &&
            owned_atoms >= 0 && owned_atoms <= all_species.numel(),
        "A step of PET needs species [atoms], pairs [pairs, 5] and at most so many owned atoms, "
        "but found the sizes ",
        all_species.sizes(),
        " and ",
        all_pairs.sizes(),
        ", and ",
        owned_atoms,
        " owned atoms."
    );
    auto no_gradient = at::NoGradGuard();
    // Until everything is there, there is no structure.
    atoms = -1;
    auto count = all_species.numel(), pairs = 2 * all_pairs.size(0);
    auto on_device = all_species.to(device, at::kLong);
    if (count > 0) {
        auto index = backend.species_to_species_index();
        auto inside = (on_device >= 0).logical_and(on_device < index.numel());
        auto known = inside.logical_and(index.index_select(0, on_device * inside) >= 0);
        TORCH_CHECK_VALUE(
            known.all().item<bool>(),
            "The model does not know the atomic type ",
            on_device.index({known.logical_not()})[0].item<int64_t>(),
            "; take a model that was trained with it."
        );
    }
    make_room(count, pairs);

    auto integers = at::TensorOptions(at::kInt).device(device);
    species.fill_(spare_species);
    species.narrow(0, 0, count).copy_(on_device);
    weights.zero_();
    weights.narrow(0, 0, owned_atoms).fill_(1.0);
    positions.zero_();

    // both directions, in rows by their centre
    TORCH_CHECK_VALUE(
        at::isIntegralType(all_pairs.scalar_type(), /*includeBool=*/false),
        "A step of PET needs pairs as integers, but found ",
        all_pairs.scalar_type(),
        "."
    );
    auto one = all_pairs.to(integers);
    if (pairs > 0) {
        auto [lowest, highest] = at::aminmax(one.narrow(1, 0, 2));
        auto range = at::stack({lowest, highest}).to(at::kCPU);
        auto low = range[0].item<int>(), high = range[1].item<int>();
        TORCH_CHECK_VALUE(
            low >= 0 && high < count,
            "A step of PET needs pairs of its ",
            count,
            " atoms, numbered from 0, but found the indices ",
            low,
            " to ",
            high,
            "."
        );
    }
    auto first = one.select(1, 0), second = one.select(1, 1), shift = one.narrow(1, 2, 3);
    auto [sorted_neighbors, sorted_shifts, starts] = pet_sort_by_center(
        at::cat({first, second}),
        at::cat({second, first}),
        at::cat({shift, shift.neg()}),
        row_starts.numel() - 1
    );
    row_starts.copy_(starts);
    neighbors.narrow(0, 0, pairs).copy_(sorted_neighbors);
    cell_shifts.narrow(0, 0, pairs).copy_(sorted_shifts);
    owned = owned_atoms;
    atoms = count;
}

int64_t PetStep::Implementation::with_room(int64_t size, int64_t least) const {
    return spare.has_value() ? size + std::max(least, static_cast<int64_t>(size * *spare)) : size;
}

/// Arrays that are large enough for the structure, and not much too large: those that are there if
/// they are.
void PetStep::Implementation::make_room(int64_t atoms, int64_t pairs) {
    auto fits = [&](const at::Tensor &array, int64_t size, int64_t least) {
        return array.defined() && size <= array.size(0) &&
               array.size(0) <= with_room(spare.has_value() ? 2 * size : size, least);
    };
    if (fits(neighbors, pairs, 1024) && fits(positions, atoms, 16)) {
        return;
    }
    invalidate();
    auto rows = with_room(atoms, 16), room = with_room(pairs, 1024);
    auto floats = at::TensorOptions(at::kDouble).device(device);
    auto integers = floats.dtype(at::kInt);
    neighbors = at::Tensor();
    cell = at::zeros({3, 3}, floats);
    weights = at::zeros({rows}, floats);
    auto sizes = StepResult::sizes(rows, uncertainty);
    result = at::zeros({std::accumulate(sizes.begin(), sizes.end(), int64_t(0))}, floats);
    species = at::zeros({rows}, integers);
    cell_shifts = at::zeros({room, 3}, integers);
    row_starts = at::zeros({rows + 1}, integers);
    positions = at::zeros({rows, 3}, floats);
    // the last one, without which nothing is used
    neighbors = at::zeros({room}, integers);
}

void PetStep::Implementation::invalidate() {
    graph.reset();
    edge_capacity = -1;
}

/// From what is in the arrays to `result`.
void PetStep::Implementation::step(int64_t capacity) {
    auto gradients_on = at::AutoGradMode(true);
    // TorchScript's optimizer would compile kernels, and watch some steps first.
    auto optimizer_off = torch::jit::GraphOptimizerEnabledGuard(false);
    auto inputs = positions.detach().requires_grad_(true);
    // Positions and strain are FP64 and rounded to the model's type behind the strain: so the sum
    // over atoms that makes the virial is FP64, too.
    auto strain = at::eye(3, cell.options()).requires_grad_(true);
    auto strained_cell = cell.matmul(strain).to(dtype);
    auto [batch_data, status] = backend.edges_of_system(
        inputs.matmul(strain).to(dtype),
        strained_cell,
        neighbors,
        cell_shifts,
        row_starts,
        species,
        capacity
    );
    auto [values, gradients] = lean ? pass_lean(batch_data, strained_cell, {inputs, strain})
                                    : pass_fast(batch_data, strained_cell, {inputs, strain});
    auto no_gradient = at::NoGradGuard();
    // No pair of atoms is close if their distance is not a number, so the energies would be.
    auto nothing = 0.0 * (positions.sum() + cell.sum());
    auto found = StepResult{
        .energies = values.energies.detach() + nothing,
        .position_gradient = gradients[0],
        .strain_gradient = gradients[1],
        .status = status,
        .uncertainties = values.uncertainties
    };
    result.copy_(found.concatenated());
}

std::pair<PetBackend::Energies, variable_list> PetStep::Implementation::pass_fast(
    const BatchData &batch_data, const at::Tensor &strained_cell, const variable_list &inputs
) {
    auto values = backend.energies_of_edges(batch_data, strained_cell, energy, uncertainty);
    return {values, gradients_of({values.energies}, inputs, {weights})};
}

std::pair<PetBackend::Energies, variable_list> PetStep::Implementation::pass_lean(
    const BatchData &batch_data, const at::Tensor &strained_cell, const variable_list &inputs
) {
    auto vectors = batch_data.at(PetBackend::edge_vectors).toTensor();
    auto factors = batch_data.at(PetBackend::edge_cutoff_factors).toTensor();
    auto leaf = [](const at::Tensor &tensor) { return tensor.detach().requires_grad_(true); };
    auto cut_vectors = leaf(vectors), cut_factors = leaf(factors);
    batch_data.insert_or_assign(PetBackend::edge_vectors, cut_vectors);
    batch_data.insert_or_assign(PetBackend::edge_cutoff_factors, cut_factors);

    // Forward: what goes from layer to layer, and the features for the heads.
    auto nodes = variable_list(), messages = variable_list();
    auto node_features = c10::List<at::Tensor>(), edge_features = c10::List<at::Tensor>();
    {
        auto no_gradient = at::NoGradGuard();
        auto first = backend.first_features(batch_data);
        nodes.push_back(first.nodes);
        messages.push_back(first.messages);
        for (int64_t i = 0; i < num_layers; i++) {
            auto outputs = backend.layer(i, {nodes.back(), messages.back()}, batch_data);
            if (i == num_layers - 1 || !feedforward) {
                node_features.push_back(outputs.nodes);
                edge_features.push_back(outputs.edges);
            }
            if (i < num_layers - 1) {
                nodes.push_back(outputs.nodes);
                messages.push_back(outputs.messages);
            }
        }
    }
    // Backward: the heads, and then layer by layer with its forward pass again.
    auto grad_node_features = variable_list(), grad_edge_features = variable_list();
    auto grad_vectors = at::zeros_like(vectors), grad_factors = at::zeros_like(factors);
    auto values = PetBackend::Energies();
    {
        auto leaves = variable_list{cut_factors};
        auto node_leaves = c10::List<at::Tensor>(), edge_leaves = c10::List<at::Tensor>();
        for (size_t i = 0; i < node_features.size(); i++) {
            leaves.push_back(leaf(node_features.get(i)));
            node_leaves.push_back(leaves.back());
            leaves.push_back(leaf(edge_features.get(i)));
            edge_leaves.push_back(leaves.back());
        }
        node_features.clear();
        edge_features.clear();
        values = backend.energies_of_features(
            node_leaves, edge_leaves, batch_data, strained_cell.detach(), energy, uncertainty
        );
        auto gradients = gradients_of({values.energies}, leaves, {weights});
        values.energies = values.energies.detach();
        grad_factors += gradients[0];
        for (size_t i = 1; i < gradients.size(); i += 2) {
            grad_node_features.push_back(gradients[i]);
            grad_edge_features.push_back(gradients[i + 1]);
        }
    }
    auto grad_nodes = at::Tensor(), grad_messages = at::Tensor();
    for (auto i = num_layers - 1; i >= 0; i--) {
        auto leaves = variable_list{leaf(nodes.back()), leaf(messages.back())};
        nodes.pop_back();
        messages.pop_back();
        leaves.push_back(cut_vectors);
        leaves.push_back(cut_factors);
        auto outputs = backend.layer(i, {leaves[0], leaves[1]}, batch_data);
        // With the feedforward featurizer the features are the last layer's nodes and messages,
        // with the residual one the nodes go to the heads only.
        auto grad_edges = at::Tensor();
        if (!grad_node_features.empty() && (i == num_layers - 1 || !feedforward)) {
            grad_nodes = grad_node_features.back();
            grad_edges = grad_edge_features.back();
            grad_node_features.pop_back();
            grad_edge_features.pop_back();
        }
        auto gradients = gradients_of(
            {outputs.nodes, outputs.edges, outputs.messages},
            leaves,
            {grad_nodes, grad_edges, grad_messages}
        );
        grad_nodes = gradients[0];
        grad_messages = gradients[1];
        grad_vectors += gradients[2];
        grad_factors += gradients[3];
    }
    return {values, gradients_of({vectors, factors}, inputs, {grad_vectors, grad_factors})};
}

void PetStep::Implementation::capture() {
    try {
        // What steps without a graph have left is of no use to it.
        at::accelerator::emptyCache();
        auto allocated = [&] {
            constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
            return at::accelerator::getDeviceStats(device.index()).allocated_bytes[all];
        };
        auto before = allocated();
        at::accelerator::resetPeakStats(device.index());
        graph.emplace(device, [&] { step(edge_capacity); });
        auto after = allocated();
        graph_memory = after.peak - before.current;
        peak_memory = std::max({peak_memory, before.peak, after.peak});
        captures++;
    } catch (const c10::Error &error) {
        capture_problem = error.what_without_backtrace();
    } catch (const std::exception &error) {
        capture_problem = error.what();
    }
}

PetStep::Result PetStep::evaluate(const at::Tensor &positions, const at::Tensor &cell) {
    auto &self = *implementation;
    auto guard = c10::DeviceGuard(self.device);
    TORCH_CHECK_VALUE(self.atoms >= 0, "A step of PET needs a structure first: set_structure.");
    TORCH_CHECK_VALUE(
        positions.sizes() == at::IntArrayRef({self.atoms, 3}) &&
            cell.sizes() == at::IntArrayRef({3, 3}),
        "A step of PET needs positions [",
        self.atoms,
        ", 3] and cell [3, 3], but found the sizes ",
        positions.sizes(),
        " and ",
        cell.sizes(),
        "."
    );
    {
        auto no_gradient = at::NoGradGuard();
        self.positions.narrow(0, 0, self.atoms).copy_(positions);
        self.cell.copy_(cell);
    }
    auto rows = self.positions.size(0);
    auto found = StepResult();
    auto edges = int64_t(0);
    auto fetch = [&] {
        found = StepResult::in(self.result.to(at::kCPU), rows, self.uncertainty);
        edges = static_cast<int64_t>(found.status.const_data_ptr<double>()[0]);
    };

    auto graphs = self.graph_problem.empty() && self.capture_problem.empty();
    if (graphs && self.edge_capacity >= 0 && !self.graph.has_value()) {
        self.capture();
    }
    auto done = self.graph.has_value();
    if (done) {
        self.graph->replay();
        fetch();
        // A graph with room for too few edges has left some out, and one for far too many wastes
        // time.
        done = edges <= self.edge_capacity;
        if (!done || 2 * edges + 1024 < self.edge_capacity) {
            self.invalidate();
        }
    }
    if (!done) {
        // On the CPU there is no graph that rows to spare would be for, but they can be tried
        // there.
        auto capacity = self.device.is_cuda() ? -1 : self.edge_capacity;
        auto step = [&] { self.step(capacity); };
        if (graphs) {
            CudaGraph::prepare(self.device, step);
        } else {
            step();
        }
        fetch();
        if (capacity >= 0 && edges > capacity) {
            self.step(-1);
            fetch();
        }
        if (self.spare.has_value()) {
            self.edge_capacity = self.with_room(edges, 256);
        }
    }
    auto without_reverse = found.status.const_data_ptr<double>()[1];
    TORCH_CHECK(
        without_reverse == 0,
        "For ",
        without_reverse,
        " edges of PET there is no reverse one; this is an error of metatomic-tc."
    );
    return {
        .energies = found.energies.narrow(0, 0, self.owned),
        .uncertainties =
            self.uncertainty ? found.uncertainties.narrow(0, 0, self.owned) : at::Tensor(),
        .position_gradient =
            found.position_gradient.narrow(0, 0, 3 * self.atoms).view({self.atoms, 3}),
        .strain_gradient = found.strain_gradient.view({3, 3})
    };
}

void PetStep::set_lean(bool lean) {
    if (lean != implementation->lean) {
        release();
    }
    implementation->lean = lean;
}

bool PetStep::lean() const {
    return implementation->lean;
}

int64_t PetStep::captures() const {
    return implementation->captures;
}

const std::string &PetStep::graph_problem() const {
    return implementation->graph_problem;
}

int64_t PetStep::graph_memory() const {
    return implementation->graph.has_value() ? implementation->graph_memory : 0;
}

const std::string &PetStep::capture_problem() const {
    return implementation->capture_problem;
}

int64_t PetStep::peak_memory() const {
    return implementation->peak_memory;
}

void PetStep::release() {
    implementation->invalidate();
    implementation->capture_problem.clear();
}

} // namespace metatomic_tc
