#pragma once

namespace metatomic_tc {

/// A slice of the input, or of the output's gradient, and one of the weight; 0 is the largest.
struct SlicePair {
    int rows;
    int weight;
};

/// Number `i` of the nine products of three BF16 slices, the smallest first; bf16x6 leaves out the
/// first three. For the host and for kernels.
constexpr SlicePair bf16_product(int i) {
    constexpr SlicePair products[] = {
        {2, 2}, {2, 1}, {1, 2}, {2, 0}, {1, 1}, {0, 2}, {1, 0}, {0, 1}, {0, 0}
    };
    return products[i];
}

} // namespace metatomic_tc
