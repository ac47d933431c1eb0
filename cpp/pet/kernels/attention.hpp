#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

/// Attention among the tokens of each atom: its centre and its edges, any number of them. The
/// weights are softmax(scale q·k + log(max(c, 1e-15))), with the cutoff factor c of the key's edge,
/// 1 for the centre. Softmax and sums are in the type of the data; the backward computes the
/// weights again (Dao et al., FlashAttention, 2022).
namespace metatomic_tc::pet {

/// The smallest cutoff factor that counts as such, as in metatrain.
constexpr double smallest_factor = 1e-15;

/// Columns of a head, on a GPU.
constexpr int largest_head_size = 128;

template <class T> struct Attention {
    /// [atoms + edges, 3, heads, head_size]: queries, keys and values. Rows below `atoms` are
    /// centres, the others edges in rows by their centre.
    const T *qkv;
    /// [edges]
    const T *factors;
    /// [atoms + 1]
    const int *row_starts;
    int64_t atoms;
    int heads, head_size;
    T scale;
    /// [atoms + edges, heads, head_size]
    T *output;
    /// [atoms + edges, heads]: the logarithm of the softmax's denominator
    T *log_sums;
};

template <class T> struct AttentionBackward {
    /// with the outputs of the forward
    Attention<T> forward;
    /// [atoms + edges, heads, head_size]
    const T *gradient;
    /// [atoms + edges, heads], working memory
    T *products;
    /// like `qkv`
    T *grad_qkv;
    /// [atoms + edges, heads]: the gradient of the logarithm of the factor of this key
    T *grad_log_factors;
};

/// Where the data of the tokens of one atom lie.
template <class T> struct AtomTokens {
    int64_t atom, first_edge_row;
    int count;

#ifdef __CUDACC__
    __host__ __device__
#endif
    AtomTokens(const Attention<T> &attention, int64_t atom)
        : atom(atom), first_edge_row(attention.atoms + attention.row_starts[atom] - 1),
          count(attention.row_starts[atom + 1] - attention.row_starts[atom] + 1) {
    }

#ifdef __CUDACC__
    __host__ __device__
#endif
        int64_t row(int token) const {
        return token == 0 ? atom : first_edge_row + token;
    }
};

/// On the current CUDA device, for head sizes up to `largest_head_size`.
/// @throws std::runtime_error if CUDA fails, or this build has no CUDA kernels
template <class T> void launch_attention(const Attention<T> &attention, void *stream);
template <class T> void launch_attention(const AttentionBackward<T> &attention, void *stream);

} // namespace metatomic_tc::pet
