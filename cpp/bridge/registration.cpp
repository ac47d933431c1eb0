// The operators of the namespace metatomic_tc. Models carry this library as an extension, so two
// copies of it can meet in one process; the first one registers, the others stay silent.
#include <memory>
#include <sstream>
#include <tuple>

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/script.h>
#include <torch/version.h>

#include "json.hpp"
#include "linear/operators.hpp"
#include "metatomic_tc/convert.hpp"
#include "metatomic_tc/dispatch.hpp"
#include "metatomic_tc/gemm.hpp"
#include "metatomic_tc/linear.hpp"
#include "metatomic_tc/pet_step.hpp"
#include "pet/kernels/attention.hpp"
#include "pet/operators.hpp"

namespace metatomic_tc {

namespace {

std::string json_list(const std::vector<std::string> &items) {
    auto result = std::string("[");
    for (const auto &item : items) {
        result += (result.size() == 1 ? "" : ", ") + item;
    }
    return result + "]";
}

std::string dispatch_table_json() {
    auto rows = std::vector<std::string>();
    for (const auto &rule : dispatch_table()) {
        auto row = std::ostringstream();
        row << "{\"mode\": " << json_string(to_string(rule.mode))
            << ", \"device\": " << json_string(rule.cuda ? "cuda" : "cpu")
            << ", \"min_compute_capability\": " << rule.min_compute_capability
            << ", \"max_compute_capability\": " << rule.max_compute_capability
            << ", \"min_cuda_version\": " << rule.min_cuda_version
            << ", \"min_tiles\": " << rule.min_tiles << ", \"min_k\": " << rule.min_k
            << ", \"implementation\": " << json_string(to_string(rule.implementation)) << "}";
        rows.push_back(row.str());
    }
    return json_list(rows);
}

Hardware make_hardware(bool cuda, int64_t compute_capability, int64_t cuda_version) {
    auto hardware = Hardware();
    if (cuda) {
        hardware.cuda = true;
        hardware.compute_capability = static_cast<int>(compute_capability);
        hardware.cuda_version = static_cast<int>(cuda_version);
        hardware.name = "a GPU";
    }
    return hardware;
}

std::string select_implementation_by_name(
    std::string mode,
    bool cuda,
    int64_t compute_capability,
    int64_t cuda_version,
    int64_t M,
    int64_t N,
    int64_t K
) {
    return to_string(select_implementation(
        parse_mode(mode), make_hardware(cuda, compute_capability, cuda_version), M, N, K
    ));
}

std::string supported_modes_json(bool cuda, int64_t compute_capability, int64_t cuda_version) {
    auto names = std::vector<std::string>();
    for (auto mode : supported_modes(make_hardware(cuda, compute_capability, cuda_version))) {
        names.push_back(json_string(to_string(mode)));
    }
    return json_list(names);
}

std::string hardware_json(c10::Device device) {
    auto found = hardware(device);
    auto result = std::ostringstream();
    result << "{\"cuda\": " << (found.cuda ? "true" : "false")
           << ", \"compute_capability\": " << found.compute_capability
           << ", \"cuda_version\": " << found.cuda_version
           << ", \"name\": " << json_string(found.name) << "}";
    return result.str();
}

std::string build_info_json() {
    auto result = std::ostringstream();
    result << "{\"version\": " << json_string(METATOMIC_TC_VERSION)
           << ", \"torch\": " << json_string(TORCH_VERSION)
           << ", \"cuda_architectures\": " << json_string(cuda_architectures())
           << ", \"cuda_version\": " << cuda_toolkit_version()
           << ", \"minimum_features\": " << minimum_features
           << ", \"largest_head_size\": " << pet::largest_head_size << "}";
    return result.str();
}

/// A module as it comes from Python, as the bytes of its file.
torch::jit::Module module_of(const at::Tensor &model) {
    TORCH_CHECK_VALUE(
        model.scalar_type() == at::kByte && model.dim() == 1 && model.device().is_cpu(),
        "metatomic_tc needs the bytes of a TorchScript file as a 1-dimensional uint8 tensor on the "
        "CPU, but found a ",
        model.dim(),
        "-dimensional ",
        model.scalar_type(),
        " tensor on ",
        model.device(),
        "."
    );
    auto bytes = model.contiguous();
    auto input = std::istringstream(
        std::string(static_cast<const char *>(bytes.const_data_ptr()), bytes.numel())
    );
    return torch::jit::load(input);
}

/// `convert_linear_layers` for Python.
std::tuple<at::Tensor, std::string>
convert(const at::Tensor &model, std::string mode, std::string layers) {
    auto module = module_of(model);
    auto report = convert_linear_layers(module, parse_mode(mode), layers);
    auto output = std::ostringstream();
    module.save(output);
    auto saved = output.str();
    auto result = at::empty({static_cast<int64_t>(saved.size())}, at::kByte);
    std::copy(saved.begin(), saved.end(), static_cast<char *>(result.mutable_data_ptr()));
    return {result, report.to_json()};
}

/// `PetStep` for Python, see `metatomic_tc.pet.Step`.
class PetStepClass : public torch::CustomClassHolder {
  public:
    PetStepClass(
        const at::Tensor &model,
        const std::string &energy,
        bool uncertainty,
        at::Device device,
        std::optional<double> spare,
        bool lean
    )
        : step(
              spare.has_value() ? PetStep(frozen(model, device), energy, uncertainty, *spare)
                                : PetStep(frozen(model, device), energy, uncertainty)
          ) {
        step.set_lean(lean);
    }

    void set_structure(const at::Tensor &species, const at::Tensor &pairs, int64_t owned) {
        step.set_structure(species, pairs, owned);
    }

    std::tuple<at::Tensor, at::Tensor, at::Tensor, std::optional<at::Tensor>>
    evaluate(const at::Tensor &positions, const at::Tensor &cell) {
        auto result = step.evaluate(positions, cell);
        auto uncertainties = std::optional<at::Tensor>();
        if (result.uncertainties.defined()) {
            uncertainties = result.uncertainties;
        }
        return {result.energies, result.position_gradient, result.strain_gradient, uncertainties};
    }

    int64_t graph_memory() {
        return step.graph_memory();
    }

    int64_t captures() {
        return step.captures();
    }

    std::string graph_problem() {
        return step.graph_problem() + step.capture_problem();
    }

  private:
    PetStep step;

    static torch::jit::Module frozen(const at::Tensor &model, at::Device device) {
        auto module = module_of(model);
        module.eval();
        module.to(device);
        for (auto parameter : module.parameters()) {
            parameter.set_requires_grad(false);
        }
        return module;
    }
};

/// What is not given kernels per device below has one implementation for all.
void define_pet_operators(torch::Library &m) {
    m.def(
        "pet_sort_by_center(Tensor centers, Tensor neighbors, Tensor cell_shifts, int num_atoms) "
        "-> (Tensor neighbors, Tensor cell_shifts, Tensor row_starts)",
        &pet_sort_by_center
    );
    m.def(
        "pet_adaptive_cutoffs(Tensor positions, Tensor cells, Tensor neighbors, "
        "Tensor cell_shifts, Tensor row_starts, Tensor system_indices, float num_neighbors, "
        "float max_cutoff, float width) -> Tensor",
        &pet_adaptive_cutoffs
    );
    m.def(
        "pet_select_edges(Tensor positions, Tensor cells, Tensor neighbors, Tensor cell_shifts, "
        "Tensor row_starts, Tensor system_indices, Tensor atomic_cutoffs, int capacity=-1) "
        "-> (Tensor neighbors, Tensor cell_shifts, Tensor row_starts, Tensor number)",
        &pet_select_edges
    );
    m.def(
        "pet_reverse_edges(Tensor neighbors, Tensor cell_shifts, Tensor row_starts) -> Tensor",
        &pet_reverse_edges
    );
    m.def(
        "pet_edge_vectors(Tensor positions, Tensor cells, Tensor neighbors, Tensor cell_shifts, "
        "Tensor row_starts, Tensor reverse, Tensor system_indices) -> Tensor",
        &pet_edge_vectors
    );
    m.def(
        "pet_cutoff_factors(Tensor vectors, Tensor atomic_cutoffs, Tensor neighbors, "
        "Tensor row_starts, Tensor reverse, float width, bool bump) -> Tensor",
        &pet_cutoff_factors
    );
    m.def(
        "pet_edge_tokens(Tensor? messages, Tensor vectors, Tensor geometry_weight, "
        "Tensor neighbor_table, Tensor neighbor_species) -> Tensor",
        &pet_edge_tokens
    );
    m.def(
        "pet_norm(Tensor x, Tensor weight, Tensor? bias, float epsilon, bool layer_norm) -> Tensor",
        &pet_norm
    );
    m.def(
        "pet_concatenated_norm(Tensor nodes, Tensor(a) edges, Tensor weight, Tensor? bias, "
        "float epsilon, bool layer_norm) -> (Tensor, Tensor(a))",
        &pet_concatenated_norm
    );
    m.def(
        "pet_residual_norm(Tensor tokens, Tensor edges, Tensor weight, Tensor? bias, "
        "float epsilon, bool layer_norm) -> (Tensor nodes, Tensor sums, Tensor normed)",
        &pet_residual_norm
    );
    m.def(
        "pet_reversed_pair_norm(Tensor(a) x, Tensor reverse, Tensor weight, Tensor bias, "
        "float epsilon) -> (Tensor, Tensor(a))",
        &pet_reversed_pair_norm
    );
    m.def(
        "pet_attention(Tensor qkv, Tensor cutoff_factors, Tensor row_starts, int num_heads, "
        "float scale, str mode=\"fp32\") -> Tensor",
        &pet_attention
    );
    m.def(
        "pet_segment_sum(Tensor values, Tensor factors, Tensor row_starts) -> Tensor",
        &pet_segment_sum
    );
    m.def("pet_sum(Tensor x, Tensor y, Tensor z) -> Tensor", &pet_sum);
    m.def(
        "pet_average_reversed(Tensor x, Tensor y, Tensor reverse) -> Tensor", &pet_average_reversed
    );
}

void define_operators(torch::Library &m) {
    m.def("linear(Tensor input, Tensor weight, Tensor? bias, str mode) -> Tensor");
    m.def(
        "linear_activation(Tensor input, Tensor weight, Tensor? bias, str activation, str mode) "
        "-> Tensor"
    );
    m.def(
        "linear_activation_forward(Tensor input, Tensor weight, Tensor? bias, str activation, "
        "str mode) -> (Tensor output, Tensor pre_activation)"
    );
    m.def("glu_backward(Tensor gradient, Tensor product) -> Tensor");
    m.def("linear_input_gradient(Tensor grad_output, Tensor weight, str mode) -> Tensor");
    m.def(
        "gemm(Tensor a, Tensor b, Tensor? bias, bool transpose_b, str implementation, "
        "int tile_n=0, int splits=0) -> Tensor"
    );
    m.def("convert(Tensor model, str mode, str layers=\"*\") -> (Tensor, str)", &convert);
    m.class_<PetStepClass>("PetStep")
        .def(
            torch::init<
                const at::Tensor &,
                const std::string &,
                bool,
                at::Device,
                std::optional<double>,
                bool>()
        )
        .def("set_structure", &PetStepClass::set_structure)
        .def("evaluate", &PetStepClass::evaluate)
        .def("graph_memory", &PetStepClass::graph_memory)
        .def("captures", &PetStepClass::captures)
        .def("graph_problem", &PetStepClass::graph_problem);
    m.def("dispatch_table() -> str", &dispatch_table_json);
    m.def(
        "select_implementation(str mode, bool cuda, int compute_capability, int cuda_version, "
        "int M, int N, int K) -> str",
        &select_implementation_by_name
    );
    m.def(
        "supported_modes(bool cuda, int compute_capability, int cuda_version) -> str",
        &supported_modes_json
    );
    m.def("hardware(Device device) -> str", &hardware_json);
    m.def("build_info() -> str", &build_info_json);
}

struct Registration {
    std::unique_ptr<torch::Library> definitions, cpu, cuda, meta, autograd;

    Registration() {
        if (c10::Dispatcher::singleton().findSchema({"metatomic_tc::linear", ""}).has_value()) {
            return;
        }
        auto implement = [](c10::DispatchKey key) {
            return std::make_unique<torch::Library>(
                torch::Library::IMPL, "metatomic_tc", key, __FILE__, __LINE__
            );
        };
        definitions = std::make_unique<torch::Library>(
            torch::Library::DEF, "metatomic_tc", std::nullopt, __FILE__, __LINE__
        );
        define_operators(*definitions);
        define_pet_operators(*definitions);
        cpu = implement(c10::DispatchKey::CPU);
        cpu->impl("linear", &linear_cpu);
        cpu->impl("linear_input_gradient", &linear_input_gradient_cpu);
        cpu->impl("linear_activation", &linear_activation_cpu);
        cpu->impl("linear_activation_forward", &linear_activation_forward_cpu);
        cpu->impl("glu_backward", &glu_backward_cpu);
        cuda = implement(c10::DispatchKey::CUDA);
        cuda->impl("linear", &linear_cuda);
        cuda->impl("linear_input_gradient", &linear_input_gradient_cuda);
        cuda->impl("linear_activation", &linear_activation_cuda);
        cuda->impl("linear_activation_forward", &linear_activation_forward_cuda);
        cuda->impl("glu_backward", &glu_backward_cuda);
        cuda->impl("gemm", &gemm_cuda);
        meta = implement(c10::DispatchKey::Meta);
        meta->impl("linear", &linear_meta);
        meta->impl("linear_input_gradient", &linear_input_gradient_meta);
        meta->impl("linear_activation", &linear_activation_meta);
        meta->impl("linear_activation_forward", &linear_activation_forward_meta);
        meta->impl("glu_backward", &glu_backward_meta);
        autograd = implement(c10::DispatchKey::Autograd);
        autograd->impl("linear", &linear_autograd);
        autograd->impl("linear_input_gradient", &linear_input_gradient_autograd);
        autograd->impl("linear_activation", &linear_activation_autograd);
        autograd->impl("linear_activation_forward", &linear_activation_forward_autograd);
    }
};

const Registration registration;

} // namespace

} // namespace metatomic_tc
