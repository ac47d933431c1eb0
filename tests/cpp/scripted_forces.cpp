// Loads a TorchScript module f(x) -> energy, converts its linear layers to a mode, and writes the
// energy and the forces -df/dx as text with 9 digits.
//
//     scripted_forces MODULE.pt POSITIONS.pt MODE DEVICE
#include <cstdio>
#include <fstream>
#include <iterator>

#include <torch/script.h>

#include "metatomic_tc/convert.hpp"

int main(int argc, char **argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: scripted_forces MODULE.pt POSITIONS.pt MODE DEVICE\n");
        return 2;
    }
    auto device = torch::Device(argv[4]);
    auto module = torch::jit::load(argv[1], device);
    auto report = metatomic_tc::convert_linear_layers(module, metatomic_tc::parse_mode(argv[3]));
    std::fprintf(stderr, "replaced %ld, left %ld\n", report.replaced(), report.left());

    auto file = std::ifstream(argv[2], std::ios::binary);
    auto bytes = std::vector<char>(std::istreambuf_iterator<char>(file), {});
    auto positions = torch::jit::pickle_load(bytes).toTensor().to(device).requires_grad_(true);

    auto energy = module.forward({positions}).toTensor();
    energy.backward();
    std::printf("%.9g\n", energy.item<double>());
    auto forces = positions.grad().neg().cpu().flatten();
    for (int64_t i = 0; i < forces.size(0); i++) {
        std::printf("%.9g\n", forces[i].item<double>());
    }
    return 0;
}
