#include "metatomic_tc/hardware.hpp"

namespace metatomic_tc {

std::string Hardware::description() const {
    if (!cuda) {
        return name;
    }
    auto dotted = [](int major, int minor) {
        return std::to_string(major) + "." + std::to_string(minor);
    };
    return name + " (compute capability " +
           dotted(compute_capability / 10, compute_capability % 10) + ", CUDA " +
           dotted(cuda_version / 1000, cuda_version % 1000 / 10) + ")";
}

} // namespace metatomic_tc
