#include "slices.hpp"

#include <cstring>
#include <stdexcept>

namespace metatomic_tc {

namespace {

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

bool is_finite(float value) {
    return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

/// TF32 keeps 10 of the 23 mantissa bits; round to nearest, ties away from zero (cvt.rna.tf32).
float round_to_tf32(float value) {
    return float_of((bits_of(value) + 0x1000u) & ~0x1fffu);
}

/// BF16 keeps 7 of the 23 mantissa bits; round to nearest, ties to even (cvt.rn.bf16).
float round_to_bf16(float value) {
    auto bits = bits_of(value);
    return float_of((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

template <int Slices, typename Round>
void split(const float *values, int64_t size, float scale, float *const *slices, Round round) {
    for (int64_t i = 0; i < size; i++) {
        auto rest = values[i];
        if (!is_finite(rest)) {
            slices[0][i] = rest;
            for (int slice = 1; slice < Slices; slice++) {
                slices[slice][i] = 0;
            }
            continue;
        }
        for (int slice = 0; slice < Slices; slice++) {
            slices[slice][i] = round(rest);
            rest = (rest - slices[slice][i]) * scale;
        }
    }
}

} // namespace

const SliceProducts &slice_products(Mode mode) {
    static const SliceProducts tf32 = {1, 1, {{{0, 0}}}};
    // lo·lo is below FP32's own rounding error
    static const SliceProducts tf32x3 = {2, 1, {{{1, 0}, {0, 1}}, {{0, 0}}}};
    static const SliceProducts bf16x9 = {
        3,
        256,
        {{{2, 2}}, {{2, 1}, {1, 2}}, {{2, 0}, {1, 1}, {0, 2}}, {{1, 0}, {0, 1}}, {{0, 0}}},
    };
    switch (mode) {
    case Mode::tf32:
        return tf32;
    case Mode::tf32x3:
        return tf32x3;
    case Mode::bf16x9:
    case Mode::bf16x9_eager:
        return bf16x9;
    case Mode::fp32:
        break;
    }
    throw std::logic_error("The mode " + to_string(mode) + " does not slice its operands.");
}

void split(Mode mode, const float *values, int64_t size, float *const *slices) {
    const auto &products = slice_products(mode);
    switch (products.slices) {
    case 1:
        return split<1>(values, size, products.scale, slices, round_to_tf32);
    case 2:
        return split<2>(values, size, products.scale, slices, round_to_tf32);
    default:
        return split<3>(values, size, products.scale, slices, round_to_bf16);
    }
}

} // namespace metatomic_tc
