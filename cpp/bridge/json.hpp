#pragma once

#include <string>

#include "metatomic_tc/convert.hpp"
#include "product/plan.hpp"

/// What Python is told, as JSON.
namespace metatomic_tc {

/// The rows of `kernel_table`: {"mode", "device", "min_compute_capability",
/// "max_compute_capability", "min_cuda_version", "aligned", "fills_multiprocessors", "min_tiles",
/// "min_k", "kernel"}, ...
std::string kernel_table_json();

/// The rows of `attention_table`: {"mode", "min_compute_capability", "head_size", "kernel"}, ...
std::string attention_table_json();

/// {"name", "kernel", "tile_n", "splits", "fuses_activation", "workspace_size", "packed_size"}
std::string json_of(const Plan &plan);

/// {"cuda", "compute_capability", "cuda_version", "multiprocessors", "name"}
std::string json_of(const Hardware &hardware);

/// {"mode", "layers": [{"path", "in_features", "out_features", "replaced", "kernels"}, ...],
/// "attention": [{"path", "head_size", "kernel"}, ...], "fused", "problem"}, with the kernels of
/// `hardware`, of a conversion of the layers that match `pattern`.
std::string
json_of(const ConversionReport &report, const Hardware &hardware, const std::string &pattern);

/// ["fp32", ...]
std::string json_of(const std::vector<Mode> &modes);

/// {"version", "torch", "cuda_architectures", "cuda_version", "minimum_features",
/// "largest_head_size"}
std::string build_info_json();

} // namespace metatomic_tc
