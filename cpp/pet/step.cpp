#include "metatomic_tc/pet_step.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include "cuda_graph.hpp"
#include "linear/packed_weights.hpp"

namespace metatomic_tc {

using torch::autograd::variable_list;

namespace {

/// What `FlatPETBackend.edges_of_system` makes.
using EdgeTensors = c10::impl::GenericDict;

/// The module in `model` that is a `FlatPETBackend`.
std::optional<torch::jit::Module> find_backend(const torch::jit::Module &model) {
    for (const auto &module : model.modules()) {
        if (module.find_method("energies_of_features").has_value()) {
            return module;
        }
    }
    return std::nullopt;
}

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
    torch::jit::Module backend;
    std::string energy;
    bool uncertainty = false;
    std::optional<double> spare;
    at::Device device = at::kCPU;
    at::ScalarType dtype = at::kFloat;
    /// one that the model knows
    int64_t spare_species = 0;
    int64_t num_layers = 0;
    bool feedforward = true;
    bool lean = false;
    std::string graph_problem, capture_problem;
    int64_t captures = 0;
    int64_t graph_memory = 0, peak_memory = 0;

    /// Of the structure.
    int64_t atoms = -1, owned = 0;
    /// Room for edges; negative for as many as there are.
    int64_t edge_capacity = -1;
    /// What a step reads and writes, with room for more atoms and pairs. Species, neighbors, cell
    /// shifts and row starts are as `FlatPETBackend.edges_of_system` takes them; weights, FP64, are
    /// 1 for owned atoms and 0 for others.
    at::Tensor positions, cell, species, weights, neighbors, cell_shifts, row_starts;
    /// FP64: the energies of all atoms, the gradients with respect to positions and strain, the
    /// number of edges and that of pairs without a reverse, and the uncertainties if wanted
    at::Tensor result;
    /// The model's, which nothing changes as long as it is used here.
    std::unique_ptr<PackedWeights> packed_weights;
    std::optional<CudaGraph> graph;

    void set_structure(const at::Tensor &species, const at::Tensor &pairs, int64_t owned);
    int64_t with_room(int64_t size, int64_t least) const;
    void make_room(int64_t atoms, int64_t pairs);
    void step(int64_t capacity);
    void capture();
    std::array<at::Tensor, 3> layer(
        int64_t index, const at::Tensor &nodes, const at::Tensor &messages, const EdgeTensors &edges
    );
    /// The energies and uncertainties, from the features.
    variable_list heads(
        const c10::IValue &node_features,
        const c10::IValue &edge_features,
        const EdgeTensors &edges,
        const at::Tensor &strained_cell
    );
    /// The energies and uncertainties, and the gradients of the energies' weighted sum.
    std::pair<variable_list, variable_list> pass_fast(
        const EdgeTensors &edges, const at::Tensor &strained_cell, const variable_list &inputs
    );
    std::pair<variable_list, variable_list> pass_lean(
        const EdgeTensors &edges, const at::Tensor &strained_cell, const variable_list &inputs
    );
};

std::string
PetStep::why_not(const torch::jit::Module &model, const std::string &energy, bool uncertainty) {
    auto backend = find_backend(model);
    if (!backend.has_value()) {
        return "the model is no PET with the backend of metatomic-tc (see metatomic-tc export)";
    }
    for (const auto &target : backend->attr("energy_targets").toListRef()) {
        if (target.toStringRef() != energy) {
            continue;
        }
        auto has_one = backend->attr("uncertainty_matrix").toTensor().numel() > 0;
        if (uncertainty && !(has_one && energy == "energy")) {
            return "the uncertainty of the output " + energy + " is not known to the backend";
        }
        return "";
    }
    return "the output " + energy +
           " of the model is no energy in eV, or has a repulsion (ZBL) added to it, or the model "
           "is not in angstrom";
}

PetStep::PetStep(
    const torch::jit::Module &model,
    const std::string &energy,
    bool uncertainty,
    std::optional<double> spare
)
    : implementation(std::make_unique<Implementation>()) {
    auto problem = why_not(model, energy, uncertainty);
    TORCH_CHECK_VALUE(problem.empty(), "A step of PET cannot be made: ", problem, ".");
    auto &self = *implementation;
    self.backend = *find_backend(model);
    self.energy = energy;
    self.uncertainty = uncertainty;
    self.num_layers = self.backend.attr("num_layers").toInt();
    self.feedforward = self.backend.attr("feedforward").toBool();
    auto table = self.backend.attr("energy_scales").toTensor();
    self.device = table.device();
    self.dtype = table.scalar_type();
    self.spare = spare;
    auto tensors = std::vector<at::Tensor>();
    for (const auto &tensor : self.backend.parameters()) {
        tensors.push_back(tensor);
    }
    for (const auto &tensor : self.backend.buffers()) {
        tensors.push_back(tensor);
    }
    self.packed_weights = std::make_unique<PackedWeights>(tensors);
    auto known = self.backend.attr("species_to_species_index").toTensor() >= 0;
    self.spare_species = known.nonzero()[0].item<int64_t>();
    if (!self.device.is_cuda()) {
        self.graph_problem = "there are none on the CPU";
    } else if (!spare.has_value()) {
        self.graph_problem = "the arrays have no room to spare";
    } else {
        self.graph_problem = CudaGraph::why_not();
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
        auto index = backend.attr("species_to_species_index").toTensor();
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
    auto [centers, order] = at::sort(at::cat({first, second}), /*stable=*/true, 0, false);
    auto starts = at::arange(row_starts.numel(), integers);
    row_starts.copy_(at::searchsorted(centers, starts, /*out_int32=*/true));
    neighbors.narrow(0, 0, pairs).copy_(at::cat({second, first}).index_select(0, order));
    cell_shifts.narrow(0, 0, pairs).copy_(at::cat({shift, shift.neg()}).index_select(0, order));
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
    graph.reset();
    edge_capacity = -1;
    auto rows = with_room(atoms, 16), room = with_room(pairs, 1024);
    auto floats = at::TensorOptions(at::kDouble).device(device);
    auto integers = floats.dtype(at::kInt);
    neighbors = at::Tensor();
    cell = at::zeros({3, 3}, floats);
    weights = at::zeros({rows}, floats);
    result = at::zeros({(uncertainty ? 5 : 4) * rows + 11}, floats);
    species = at::zeros({rows}, integers);
    cell_shifts = at::zeros({room, 3}, integers);
    row_starts = at::zeros({rows + 1}, integers);
    positions = at::zeros({rows, 3}, floats);
    // the last one, without which nothing is used
    neighbors = at::zeros({room}, integers);
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
    auto found = backend.run_method(
        "edges_of_system",
        inputs.matmul(strain).to(dtype),
        strained_cell,
        neighbors,
        cell_shifts,
        row_starts,
        species,
        capacity
    );
    auto edges = found.toTuple()->elements()[0].toGenericDict();
    auto status = found.toTuple()->elements()[1].toTensor();
    auto [values, gradients] = lean ? pass_lean(edges, strained_cell, {inputs, strain})
                                    : pass_fast(edges, strained_cell, {inputs, strain});
    auto no_gradient = at::NoGradGuard();
    // No pair of atoms is close if their distance is not a number, so the energies would be.
    auto nothing = 0.0 * (positions.sum() + cell.sum());
    result.copy_(
        at::cat(
            {values[0].detach() + nothing,
             gradients[0].reshape({-1}),
             gradients[1].reshape({-1}),
             status.to(at::kDouble),
             values[1].to(at::kDouble)}
        )
    );
}

/// One layer's nodes, edges and messages.
std::array<at::Tensor, 3> PetStep::Implementation::layer(
    int64_t index, const at::Tensor &nodes, const at::Tensor &messages, const EdgeTensors &edges
) {
    auto outputs = backend.run_method("layer", index, nodes, messages, edges).toTuple();
    return {
        outputs->elements()[0].toTensor(),
        outputs->elements()[1].toTensor(),
        outputs->elements()[2].toTensor()
    };
}

variable_list PetStep::Implementation::heads(
    const c10::IValue &node_features,
    const c10::IValue &edge_features,
    const EdgeTensors &edges,
    const at::Tensor &strained_cell
) {
    auto outputs = backend
                       .run_method(
                           "energies_of_features",
                           node_features,
                           edge_features,
                           edges,
                           strained_cell,
                           energy,
                           uncertainty
                       )
                       .toTuple();
    return {outputs->elements()[0].toTensor(), outputs->elements()[1].toTensor()};
}

std::pair<variable_list, variable_list> PetStep::Implementation::pass_fast(
    const EdgeTensors &edges, const at::Tensor &strained_cell, const variable_list &inputs
) {
    auto features = backend.run_method("calculate_features", edges, false).toTuple();
    auto values = heads(features->elements()[0], features->elements()[1], edges, strained_cell);
    features = {};
    return {values, gradients_of({values[0]}, inputs, {weights})};
}

std::pair<variable_list, variable_list> PetStep::Implementation::pass_lean(
    const EdgeTensors &edges, const at::Tensor &strained_cell, const variable_list &inputs
) {
    auto vectors = edges.at("edge_vectors").toTensor();
    auto factors = edges.at("edge_cutoff_factors").toTensor();
    auto leaf = [](const at::Tensor &tensor) { return tensor.detach().requires_grad_(true); };
    auto cut_vectors = leaf(vectors), cut_factors = leaf(factors);
    edges.insert_or_assign("edge_vectors", cut_vectors);
    edges.insert_or_assign("edge_cutoff_factors", cut_factors);

    // Forward: what goes from layer to layer, and the features for the heads.
    auto nodes = variable_list(), messages = variable_list();
    auto node_features = c10::List<at::Tensor>(), edge_features = c10::List<at::Tensor>();
    {
        auto no_gradient = at::NoGradGuard();
        auto first = backend.run_method("first_features", edges).toTuple();
        nodes.push_back(first->elements()[0].toTensor());
        messages.push_back(first->elements()[1].toTensor());
        for (int64_t i = 0; i < num_layers; i++) {
            auto outputs = layer(i, nodes.back(), messages.back(), edges);
            if (i == num_layers - 1 || !feedforward) {
                node_features.push_back(outputs[0]);
                edge_features.push_back(outputs[1]);
            }
            if (i < num_layers - 1) {
                nodes.push_back(outputs[0]);
                messages.push_back(outputs[2]);
            }
        }
    }
    // Backward: the heads, and then layer by layer with its forward pass again.
    auto grad_node_features = variable_list(), grad_edge_features = variable_list();
    auto grad_vectors = at::zeros_like(vectors), grad_factors = at::zeros_like(factors);
    auto values = variable_list();
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
        values = heads(node_leaves, edge_leaves, edges, strained_cell.detach());
        auto gradients = gradients_of({values[0]}, leaves, {weights});
        values[0] = values[0].detach();
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
        auto outputs = layer(i, leaves[0], leaves[1], edges);
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
            {outputs[0], outputs[1], outputs[2]}, leaves, {grad_nodes, grad_edges, grad_messages}
        );
        grad_nodes = gradients[0];
        grad_messages = gradients[1];
        grad_vectors += gradients[2];
        grad_factors += gradients[3];
    }
    return {values, gradients_of({vectors, factors}, inputs, {grad_vectors, grad_factors})};
}

void PetStep::Implementation::capture() {
    graph.reset();
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
    auto host = at::Tensor();
    auto edges = int64_t(0);
    auto fetch = [&] {
        host = self.result.to(at::kCPU);
        edges = static_cast<int64_t>(host.const_data_ptr<double>()[4 * rows + 9]);
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
            release();
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
    auto status = host.const_data_ptr<double>() + 4 * rows + 9;
    TORCH_CHECK(
        status[1] == 0,
        "For ",
        status[1],
        " edges of PET there is no reverse one; this is an error of metatomic-tc."
    );
    return {
        host.narrow(0, 0, self.owned),
        self.uncertainty ? host.narrow(0, 4 * rows + 11, self.owned) : at::Tensor(),
        host.narrow(0, rows, 3 * self.atoms).view({self.atoms, 3}),
        host.narrow(0, 4 * rows, 9).view({3, 3})
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
    implementation->graph.reset();
    implementation->edge_capacity = -1;
    implementation->capture_problem.clear();
}

} // namespace metatomic_tc
