// The operators of the namespace metatomic_tc. Models carry this library as an extension, so two
// copies of it can meet in one process; the first one registers, the others stay silent.
#include <memory>
#include <sstream>
#include <tuple>

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/script.h>

#include "json.hpp"
#include "linear/operators.hpp"
#include "metatomic_tc/convert.hpp"
#include "metatomic_tc/linear.hpp"
#include "metatomic_tc/pet_step.hpp"
#include "pet/operators.hpp"
#include "product/plan.hpp"

namespace metatomic_tc {

namespace {

/// A device that need not be here.
Hardware make_hardware(
    bool cuda, int64_t compute_capability, int64_t cuda_version, int64_t multiprocessors = 0
) {
    auto hardware = Hardware();
    if (cuda) {
        hardware.cuda = true;
        hardware.compute_capability = static_cast<int>(compute_capability);
        hardware.cuda_version = static_cast<int>(cuda_version);
        hardware.multiprocessors = static_cast<int>(multiprocessors);
        hardware.name = "a GPU";
    }
    return hardware;
}

std::string plan_json(
    std::string mode,
    bool cuda,
    int64_t compute_capability,
    int64_t cuda_version,
    int64_t multiprocessors,
    int64_t M,
    int64_t N,
    int64_t K,
    bool forward,
    bool aligned
) {
    auto problem = Problem{
        .mode = parse_mode(mode),
        .M = M,
        .N = N,
        .K = K,
        .direction = forward ? Direction::forward : Direction::input_gradient,
        .aligned_a = aligned,
        .aligned_weight = aligned,
    };
    return json_of(
        plan(problem, make_hardware(cuda, compute_capability, cuda_version, multiprocessors))
    );
}

std::string supported_modes_json(bool cuda, int64_t compute_capability, int64_t cuda_version) {
    return json_of(supported_modes(make_hardware(cuda, compute_capability, cuda_version)));
}

std::string hardware_json(c10::Device device) {
    return json_of(hardware(device));
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

/// `convert_linear_layers` for Python, with the kernels of `device`.
std::tuple<at::Tensor, std::string>
convert(const at::Tensor &model, std::string mode, std::string layers, c10::Device device) {
    auto module = module_of(model);
    auto report = convert_linear_layers(module, parse_mode(mode), layers);
    auto output = std::ostringstream();
    module.save(output);
    auto saved = output.str();
    auto result = at::empty({static_cast<int64_t>(saved.size())}, at::kByte);
    std::copy(saved.begin(), saved.end(), static_cast<char *>(result.mutable_data_ptr()));
    return {result, json_of(report, hardware(device), layers)};
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
        "gemm(Tensor a, Tensor b, Tensor? bias, bool transpose_b, str kernel, "
        "int tile_n=0, int splits=0) -> Tensor"
    );
    m.def(
        "convert(Tensor model, str mode, str layers=\"*\", Device device=\"cpu\") -> (Tensor, str)",
        &convert
    );
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
    m.def("kernel_table() -> str", &kernel_table_json);
    m.def("attention_table() -> str", &attention_table_json);
    m.def(
        "plan(str mode, bool cuda, int compute_capability, int cuda_version, int multiprocessors, "
        "int M, int N, int K, bool forward=True, bool aligned=True) -> str",
        &plan_json
    );
    m.def(
        "supported_modes(bool cuda, int compute_capability, int cuda_version) -> str",
        &supported_modes_json
    );
    m.def("hardware(Device device) -> str", &hardware_json);
    m.def("build_info() -> str", &build_info_json);
}

struct Registration {
    std::unique_ptr<torch::Library> definitions, meta, autograd;
    /// of the CPU and of CUDA devices
    std::vector<std::unique_ptr<torch::Library>> devices;

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
        for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
            auto device = implement(key);
            device->impl("linear", &linear_device);
            device->impl("linear_input_gradient", &linear_input_gradient_device);
            device->impl("linear_activation", &linear_activation_device);
            device->impl("linear_activation_forward", &linear_activation_forward_device);
            device->impl("glu_backward", &glu_backward_device);
            devices.push_back(std::move(device));
        }
        devices.back()->impl("gemm", &gemm_cuda);
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
