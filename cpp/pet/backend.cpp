#include "backend.hpp"

namespace metatomic_tc {

namespace {

at::Tensor tensor(const c10::IValue &tuple, size_t index) {
    return tuple.toTupleRef().elements()[index].toTensor();
}

} // namespace

PetBackend::PetBackend(torch::jit::Module found) : module(std::move(found)) {
    if (module.hasattr("interface")) {
        interface = module.attr("interface").toInt();
    }
}

std::optional<PetBackend> PetBackend::find(const torch::jit::Module &model) {
    // `backend_of` in python/metatomic_tc/pet/replace.py knows it by the same attribute.
    for (const auto &module : model.modules()) {
        if (module.hasattr("energy_targets")) {
            return PetBackend(module);
        }
    }
    return std::nullopt;
}

std::string PetBackend::why_not() const {
    if (interface >= 0 && interface <= latest_interface) {
        return "";
    }
    return "the PET backend in the model has the interface " + std::to_string(interface) +
           ", but this metatomic-tc drives the interfaces 0 to " +
           std::to_string(latest_interface) +
           "; export the model again from its checkpoint, with metatomic-tc export";
}

std::vector<std::string> PetBackend::energy_targets() const {
    auto result = std::vector<std::string>();
    for (const auto &target : module.attr("energy_targets").toListRef()) {
        result.push_back(target.toStringRef());
    }
    return result;
}

bool PetBackend::has_uncertainty() const {
    return module.attr("uncertainty_matrix").toTensor().numel() > 0;
}

int64_t PetBackend::num_layers() const {
    return module.attr("num_layers").toInt();
}

bool PetBackend::feedforward() const {
    return module.attr("feedforward").toBool();
}

at::Device PetBackend::device() const {
    return module.attr("energy_scales").toTensor().device();
}

at::ScalarType PetBackend::dtype() const {
    return module.attr("energy_scales").toTensor().scalar_type();
}

at::Tensor PetBackend::species_to_species_index() const {
    return module.attr("species_to_species_index").toTensor();
}

std::vector<at::Tensor> PetBackend::parameters_and_buffers() const {
    auto result = std::vector<at::Tensor>();
    for (const auto &parameter : module.parameters()) {
        result.push_back(parameter);
    }
    for (const auto &buffer : module.buffers()) {
        result.push_back(buffer);
    }
    return result;
}

std::pair<PetBackend::BatchData, at::Tensor> PetBackend::edges_of_system(
    const at::Tensor &positions,
    const at::Tensor &cell,
    const at::Tensor &neighbors,
    const at::Tensor &cell_shifts,
    const at::Tensor &row_starts,
    const at::Tensor &species,
    int64_t capacity
) {
    auto outputs = module.run_method(
        "edges_of_system", positions, cell, neighbors, cell_shifts, row_starts, species, capacity
    );
    return {outputs.toTupleRef().elements()[0].toGenericDict(), tensor(outputs, 1)};
}

PetBackend::Energies PetBackend::energies_of_edges(
    const BatchData &batch_data, const at::Tensor &cell, const std::string &target, bool uncertainty
) {
    if (interface == 0) {
        auto features = module.run_method("calculate_features", batch_data, false).toTuple();
        return energies_of_features(
            features->elements()[0].toTensorList(),
            features->elements()[1].toTensorList(),
            batch_data,
            cell,
            target,
            uncertainty
        );
    }
    auto outputs = module.run_method("energies_of_edges", batch_data, cell, target, uncertainty);
    return {tensor(outputs, 0), tensor(outputs, 1)};
}

PetBackend::Features PetBackend::first_features(const BatchData &batch_data) {
    auto outputs = module.run_method("first_features", batch_data);
    return {tensor(outputs, 0), tensor(outputs, 1)};
}

PetBackend::LayerOutputs
PetBackend::layer(int64_t index, const Features &features, const BatchData &batch_data) {
    auto outputs = module.run_method("layer", index, features.nodes, features.messages, batch_data);
    return {tensor(outputs, 0), tensor(outputs, 1), tensor(outputs, 2)};
}

PetBackend::Energies PetBackend::energies_of_features(
    const c10::List<at::Tensor> &nodes,
    const c10::List<at::Tensor> &edges,
    const BatchData &batch_data,
    const at::Tensor &cell,
    const std::string &target,
    bool uncertainty
) {
    auto outputs = module.run_method(
        "energies_of_features", nodes, edges, batch_data, cell, target, uncertainty
    );
    return {tensor(outputs, 0), tensor(outputs, 1)};
}

} // namespace metatomic_tc
