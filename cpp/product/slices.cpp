#include "slices.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "bf16_products.hpp"

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

/// FP16 keeps 10 of the 23 mantissa bits, and no bit below 2⁻²⁴; round to nearest, ties to even
/// (cvt.rn.f16).
float round_to_fp16(float value) {
    if (std::abs(value) < 0x1p-14f) {
        return std::nearbyint(value * 0x1p24f) * 0x1p-24f;
    }
    auto bits = bits_of(value);
    return float_of((bits + 0xfffu + ((bits >> 13) & 1u)) & ~0x1fffu);
}

/// s such that 2ˢ brings the largest magnitude of `values` into [2¹⁴, 2¹⁵), where FP16 ends: the
/// numbers smaller than that have as many of its exponents as possible.
int scale_exponent(const float *values, int64_t size) {
    auto largest = uint32_t(0);
    for (int64_t i = 0; i < size; i++) {
        largest = std::max(largest, bits_of(values[i]) & 0x7fffffffu);
    }
    auto exponent = static_cast<int>(largest >> 23) - 127;
    return largest == 0 ? 0 : std::min(14 - exponent, 126);
}

template <float round(float)>
void split(
    const SliceProducts &products,
    const float *values,
    int64_t size,
    float factor,
    float *const *slices
) {
    for (int64_t i = 0; i < size; i++) {
        auto rest = values[i] * factor;
        auto finite = is_finite(rest);
        slices[0][i] = finite ? round(rest) : rest;
        for (int slice = 1; slice < products.slices; slice++) {
            rest = (rest - slices[slice - 1][i]) * products.scale;
            slices[slice][i] = finite ? round(rest) : 0;
        }
    }
}

/// The `count` largest products of three BF16 slices, in bands of equal scale.
std::vector<std::vector<std::pair<int, int>>> bf16_bands(int count) {
    auto bands = std::vector<std::vector<std::pair<int, int>>>();
    auto last = -1;
    for (int i = 9 - count; i < 9; i++) {
        auto pair = bf16_product(i);
        if (pair.rows + pair.weight != last) {
            bands.emplace_back();
        }
        last = pair.rows + pair.weight;
        bands.back().emplace_back(pair.rows, pair.weight);
    }
    return bands;
}

} // namespace

const SliceProducts &slice_products(Mode mode) {
    using F = SliceFormat;
    static const SliceProducts tf32 = {F::tf32, 1, 1, {{{0, 0}}}};
    // lo·lo is below FP32's own rounding error, and so are the three smallest of the nine products
    static const SliceProducts tf32x3 = {F::tf32, 2, 1, {{{1, 0}, {0, 1}}, {{0, 0}}}};
    static const SliceProducts fp16x3 = {F::fp16, 2, 2048, tf32x3.bands, 32};
    static const SliceProducts bf16x6 = {F::bf16, 3, 256, bf16_bands(6)};
    static const SliceProducts bf16x9 = {F::bf16, 3, 256, bf16_bands(9)};
    switch (mode) {
    case Mode::tf32:
        return tf32;
    case Mode::tf32x3:
        return tf32x3;
    case Mode::fp16x3:
        return fp16x3;
    case Mode::bf16x6:
        return bf16x6;
    case Mode::bf16x9:
    case Mode::bf16x9_eager:
        return bf16x9;
    case Mode::fp32:
        break;
    }
    throw std::logic_error("The mode " + to_string(mode) + " does not slice its operands.");
}

float split(Mode mode, const float *values, int64_t size, float *const *slices) {
    const auto &products = slice_products(mode);
    auto exponent = products.chunk == 0 ? 0 : scale_exponent(values, size);
    auto factor = std::ldexp(1.0f, exponent);
    switch (products.format) {
    case SliceFormat::tf32:
        split<round_to_tf32>(products, values, size, factor, slices);
        break;
    case SliceFormat::bf16:
        split<round_to_bf16>(products, values, size, factor, slices);
        break;
    case SliceFormat::fp16:
        split<round_to_fp16>(products, values, size, factor, slices);
        break;
    }
    return std::ldexp(1.0f, -exponent);
}

} // namespace metatomic_tc
