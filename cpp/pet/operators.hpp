#pragma once

#include <optional>
#include <string>
#include <tuple>

#include <ATen/ATen.h>

/// The operators of the PET backend, `metatomic_tc::pet_*`, on the CPU and on CUDA devices, with
/// gradients for inputs but not for parameters: a parameter that requires a gradient is an error,
/// and so is a second derivative. Floating-point data are float32 or float64, all of one type;
/// indices are int32. Pairs and edges lie in rows by their centre: those of atom i are
/// `row_starts[i]` to `row_starts[i + 1]`, and `reverse[e]` is the edge (j, i, -shift) of the edge
/// e = (i, j, shift). Lengths are in the unit of `positions`. Nothing here adds with atomics:
/// results are bit-identical from run to run. All throw c10::Error on wrong dtypes, shapes or
/// devices.
///
/// Arrays of edges may have spare rows at their end, behind `row_starts[atoms]`, so that a CUDA
/// graph can serve a changing number of edges. Results have zeros there, or what follows from
/// zeros.
namespace metatomic_tc {

/// Pairs in rows by their centre, in their order otherwise. No gradients.
///
/// @param centers, neighbors [pairs], integers
/// @param cell_shifts [pairs, 3], integers
/// @return neighbors, cell shifts and the [num_atoms + 1] starts of the rows, all int32
std::tuple<at::Tensor, at::Tensor, at::Tensor> pet_sort_by_center(
    const at::Tensor &centers,
    const at::Tensor &neighbors,
    const at::Tensor &cell_shifts,
    int64_t num_atoms
);

/// The cutoff of each atom within which it has `num_neighbors` neighbors, by metatrain's `solver`.
/// The pair list must be symmetric. Gradients: positions, cells.
///
/// @param positions [atoms, 3]
/// @param cells [systems, 3, 3], rows are the cell vectors
/// @param neighbors [pairs]
/// @param cell_shifts [pairs, 3]
/// @param row_starts [atoms + 1]
/// @param system_indices [atoms]
/// @return [atoms]
at::Tensor pet_adaptive_cutoffs(
    const at::Tensor &positions,
    const at::Tensor &cells,
    const at::Tensor &neighbors,
    const at::Tensor &cell_shifts,
    const at::Tensor &row_starts,
    const at::Tensor &system_indices,
    double num_neighbors,
    double max_cutoff,
    double width
);

/// The pairs that are not longer than the mean of their atoms' cutoffs [atoms]. No gradients.
///
/// @param capacity how many edges there is room for, spare rows included. Negative: exactly as many
///     as there are, for which the host waits for the device.
/// @return neighbors, cell shifts and row starts of the edges; and how many there are [1], which
///     may be more than the capacity: then the last ones are left out
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> pet_select_edges(
    const at::Tensor &positions,
    const at::Tensor &cells,
    const at::Tensor &neighbors,
    const at::Tensor &cell_shifts,
    const at::Tensor &row_starts,
    const at::Tensor &system_indices,
    const at::Tensor &atomic_cutoffs,
    int64_t capacity
);

/// @return `reverse` [edges], -1 where an edge has no reverse; spare rows are their own
at::Tensor pet_reverse_edges(
    const at::Tensor &neighbors, const at::Tensor &cell_shifts, const at::Tensor &row_starts
);

/// From the centre to the neighbor of each edge. Gradients: positions, cells.
///
/// @return [edges, 3]
at::Tensor pet_edge_vectors(
    const at::Tensor &positions,
    const at::Tensor &cells,
    const at::Tensor &neighbors,
    const at::Tensor &cell_shifts,
    const at::Tensor &row_starts,
    const at::Tensor &reverse,
    const at::Tensor &system_indices
);

/// The cutoff function of each edge, with the mean of its atoms' cutoffs. Gradients: vectors,
/// atomic_cutoffs.
///
/// @param vectors [edges, 3]
/// @param atomic_cutoffs [atoms]
/// @param width of the smooth step
/// @param bump metatrain's bump function, else its cosine
/// @return [edges]
at::Tensor pet_cutoff_factors(
    const at::Tensor &vectors,
    const at::Tensor &atomic_cutoffs,
    const at::Tensor &neighbors,
    const at::Tensor &row_starts,
    const at::Tensor &reverse,
    double width,
    bool bump
);

/// `silu(messages + (x, y, z, distance)·geometry_weightᵀ + neighbor_table[neighbor_species])`, with
/// the distance `sqrt(x² + y² + z² + 1e-15)`. Gradients: messages, vectors.
///
/// @param messages [edges, width] or none
/// @param vectors [edges, 3]
/// @param geometry_weight [width, 4]
/// @param neighbor_table [species, width]
/// @param neighbor_species [edges]
/// @return [edges, width]
at::Tensor pet_edge_tokens(
    const std::optional<at::Tensor> &messages,
    const at::Tensor &vectors,
    const at::Tensor &geometry_weight,
    const at::Tensor &neighbor_table,
    const at::Tensor &neighbor_species
);

/// RMSNorm, or LayerNorm, of the rows of `x` [rows, width]. Gradient: x.
at::Tensor pet_norm(
    const at::Tensor &x,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    double epsilon,
    bool layer_norm
);

/// The norms of the rows of `nodes` and then of `edges`. Gradients: nodes, edges.
///
/// @return [nodes + edges, width], and `edges`: what uses them besides should take these, so that
///     both gradients are added in one pass
std::tuple<at::Tensor, at::Tensor> pet_concatenated_norm(
    const at::Tensor &nodes,
    const at::Tensor &edges,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    double epsilon,
    bool layer_norm
);

/// Takes `tokens` [nodes + edges, width] apart and adds `edges` [edges, width] to its later rows.
/// Gradients: tokens, edges.
///
/// @return the nodes' rows, the sums, and the norms of the sums
std::tuple<at::Tensor, at::Tensor, at::Tensor> pet_residual_norm(
    const at::Tensor &tokens,
    const at::Tensor &edges,
    const at::Tensor &weight,
    const std::optional<at::Tensor> &bias,
    double epsilon,
    bool layer_norm
);

/// The LayerNorm of each row of `x` [edges, width] next to that of its reverse edge. Gradient: x.
///
/// @param weight, bias [2 width]
/// @return [edges, 2 width], and `x`, as in `pet_concatenated_norm`
std::tuple<at::Tensor, at::Tensor> pet_reversed_pair_norm(
    const at::Tensor &x,
    const at::Tensor &reverse,
    const at::Tensor &weight,
    const at::Tensor &bias,
    double epsilon
);

/// Multi-head attention among the tokens of each atom, its centre and its edges, with weights
/// `softmax(scale q·k + log(max(c, 1e-15)))`; c is the cutoff factor of the key's edge, 1 for the
/// centre. Gradients: qkv, cutoff_factors.
///
/// @param qkv [atoms + edges, 3 width], the columns as [3, heads, head size]; centres come first
/// @param cutoff_factors [edges]
/// @param num_heads divides the width; heads have at most `largest_head_size` columns on a GPU
/// @param mode see `parse_mode` and `attention_kernel`; FP64 data stay FP64
/// @return [atoms + edges, width]
at::Tensor pet_attention(
    const at::Tensor &qkv,
    const at::Tensor &cutoff_factors,
    const at::Tensor &row_starts,
    int64_t num_heads,
    double scale,
    const std::string &mode
);

/// Sums of `factors[e] * values[e]` over the edges of each atom. Gradients: values, factors.
///
/// @param values [edges, width]
/// @param factors [edges]
/// @return [atoms, width]
at::Tensor
pet_segment_sum(const at::Tensor &values, const at::Tensor &factors, const at::Tensor &row_starts);

/// `(x + y[reverse]) / 2` of [edges, width]. Gradients: x, y.
at::Tensor
pet_average_reversed(const at::Tensor &x, const at::Tensor &y, const at::Tensor &reverse);

/// `x + y + z` of [rows, width], in one pass and without one for the gradients.
at::Tensor pet_sum(const at::Tensor &x, const at::Tensor &y, const at::Tensor &z);

} // namespace metatomic_tc
