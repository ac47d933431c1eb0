#include "json.hpp"

#include <initializer_list>
#include <utility>

#include <torch/version.h>

#include "pet/kernels/attention.hpp"
#include "product/gemm.hpp"

namespace metatomic_tc {

namespace {

/// `text` as a JSON string, quotes included.
std::string json(const std::string &text) {
    auto result = std::string("\"");
    for (auto character : text) {
        if (character == '"' || character == '\\') {
            result += '\\';
            result += character;
        } else if (static_cast<unsigned char>(character) < 0x20) {
            constexpr auto digits = "0123456789abcdef";
            result += "\\u00";
            result += digits[character >> 4];
            result += digits[character & 15];
        } else {
            result += character;
        }
    }
    return result + "\"";
}

std::string json(bool value) {
    return value ? "true" : "false";
}

std::string json(int64_t value) {
    return std::to_string(value);
}

/// Members whose values are JSON.
std::string object(std::initializer_list<std::pair<const char *, std::string>> members) {
    auto result = std::string("{");
    for (const auto &[name, value] : members) {
        result += (result.size() == 1 ? "" : ", ") + json(std::string(name)) + ": " + value;
    }
    return result + "}";
}

/// The JSON that `describe` makes of each item.
template <class Items, class Describe>
std::string list(const Items &items, const Describe &describe) {
    auto result = std::string("[");
    for (const auto &item : items) {
        result += (result.size() == 1 ? "" : ", ") + describe(item);
    }
    return result + "]";
}

} // namespace

std::string kernel_table_json() {
    return list(kernel_table(), [](const KernelRule &rule) {
        return object({
            {"mode", json(to_string(rule.mode))},
            {"device", json(std::string(rule.cuda ? "cuda" : "cpu"))},
            {"min_compute_capability", json(int64_t(rule.min_compute_capability))},
            {"max_compute_capability", json(int64_t(rule.max_compute_capability))},
            {"min_cuda_version", json(int64_t(rule.min_cuda_version))},
            {"aligned", json(rule.aligned)},
            {"fills_multiprocessors", json(rule.fills_multiprocessors)},
            {"min_tiles", json(rule.min_tiles)},
            {"min_k", json(rule.min_k)},
            {"kernel", json(to_string(rule.kernel))},
        });
    });
}

std::string attention_table_json() {
    return list(attention_table(), [](const AttentionRule &rule) {
        return object({
            {"mode", json(to_string(rule.mode))},
            {"min_compute_capability", json(int64_t(rule.min_compute_capability))},
            {"head_size", json(rule.head_size)},
            {"kernel", json(to_string(AttentionKernel::cuda_tf32x3))},
        });
    });
}

std::string json_of(const Plan &plan) {
    return object({
        {"name", json(plan.name())},
        {"kernel", json(to_string(plan.kernel))},
        {"tile_n", json(int64_t(plan.tile_n))},
        {"splits", json(int64_t(plan.splits))},
        {"fuses_activation", json(plan.fuses_activation)},
        {"workspace_size", json(static_cast<int64_t>(plan.workspace_size))},
        {"packed_size", json(static_cast<int64_t>(plan.packed_size))},
    });
}

std::string json_of(const Hardware &hardware) {
    return object({
        {"cuda", json(hardware.cuda)},
        {"compute_capability", json(int64_t(hardware.compute_capability))},
        {"cuda_version", json(int64_t(hardware.cuda_version))},
        {"multiprocessors", json(int64_t(hardware.multiprocessors))},
        {"name", json(hardware.name)},
    });
}

std::string
json_of(const ConversionReport &report, const Hardware &hardware, const std::string &pattern) {
    auto layer_json = [&](const LinearLayer &layer) {
        auto name = [](const std::string &text) { return json(text); };
        return object({
            {"path", json(layer.path)},
            {"in_features", json(layer.in_features)},
            {"out_features", json(layer.out_features)},
            {"replaced", json(layer.replaced)},
            {"kernels", list(report.kernels(layer, hardware), name)},
        });
    };
    auto attention_json = [&](const AttentionLayer &layer) {
        return object({
            {"path", json(layer.path)},
            {"head_size", json(layer.head_size)},
            {"kernel", json(report.kernel(layer, hardware))},
        });
    };
    return object({
        {"mode", json(to_string(report.mode))},
        {"layers", list(report.layers, layer_json)},
        {"attention", list(report.attention, attention_json)},
        {"fused", json(report.fused)},
        {"problem", json(report.problem(pattern, ""))},
    });
}

std::string json_of(const std::vector<Mode> &modes) {
    return list(modes, [](Mode mode) { return json(to_string(mode)); });
}

std::string build_info_json() {
    return object({
        {"version", json(std::string(METATOMIC_TC_VERSION))},
        {"torch", json(std::string(TORCH_VERSION))},
        {"cuda_architectures", json(std::string(cuda_architectures()))},
        {"cuda_version", json(int64_t(cuda_toolkit_version()))},
        {"minimum_features", json(minimum_features)},
        {"largest_head_size", json(int64_t(pet::largest_head_size))},
    });
}

} // namespace metatomic_tc
