#include "metatomic_tc/modes.hpp"

#include <stdexcept>

namespace metatomic_tc {

const std::vector<Mode> &all_modes() {
    static const std::vector<Mode> modes = {
        Mode::fp32,
        Mode::tf32,
        Mode::tf32x3,
        Mode::fp16x3,
        Mode::bf16x6,
        Mode::bf16x9,
        Mode::bf16x9_eager,
    };
    return modes;
}

std::string to_string(Mode mode) {
    switch (mode) {
    case Mode::fp32:
        return "fp32";
    case Mode::tf32:
        return "tf32";
    case Mode::tf32x3:
        return "tf32x3";
    case Mode::fp16x3:
        return "fp16x3";
    case Mode::bf16x6:
        return "bf16x6";
    case Mode::bf16x9:
        return "bf16x9";
    case Mode::bf16x9_eager:
        return "bf16x9-eager";
    }
    throw std::logic_error("This value of metatomic_tc::Mode has no name.");
}

Mode parse_mode(const std::string &name) {
    auto valid = std::string();
    for (auto mode : all_modes()) {
        if (to_string(mode) == name) {
            return mode;
        }
        valid += (valid.empty() ? "" : ", ") + to_string(mode);
    }
    throw std::invalid_argument(
        "Found the precision mode '" + name + "', but the modes of this version are: " + valid + "."
    );
}

} // namespace metatomic_tc
