#pragma once

// How each mode slices its operands for the Tensor Cores of compute capability 9.0, and which slice
// products it adds in which order.
//
// A step of K is 32 elements. A thread of a quad (threads 4i to 4i + 3 of a warp) loads the
// elements 8t to 8t + 7 of the step with two 16-byte loads, t its place in the quad. Where it
// slices them in registers, the products take the elements of K in another order,
// `weight_column`, in which the weight is therefore packed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "product/bf16_products.hpp"
#include "product/tf32.cuh"
#include "ptx.cuh"
#include "work.cuh"

namespace metatomic_tc::wgmma {

/// One product instruction: slice of the rows (X, dY), slice of the weight, and which of the
/// instructions along a step of K.
struct Product {
    int rows;
    int weight;
    int instruction;
};

/// Loads the elements of the thread `t` of a quad, of four, from a row of a step in shared memory,
/// as the copy engine has left it with its swizzle; `row` is the row's number modulo 8.
__device__ inline void load_row(uint32_t address, int row, int t, float (&values)[8]) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        ptx::load4(address + ((2 * t + j) ^ row) * 16, values + 4 * j);
    }
}

namespace slices {

__device__ inline uint32_t bits(float value) {
    return __float_as_uint(value);
}

/// Two numbers in the halves of a register, the first in the low half.
__device__ inline uint32_t pack(__half2 pair) {
    return *reinterpret_cast<uint32_t *>(&pair);
}

__device__ inline uint32_t pack(__nv_bfloat162 pair) {
    return *reinterpret_cast<uint32_t *>(&pair);
}

} // namespace slices

/// Two TF32 slices and three products. The products of a step come in `Parts` parts, after each of
/// which the accumulator is promoted: with two, half as much is cut off, and there is twice as much
/// to add.
template <int Parts> struct Tf32x3InParts {
    static constexpr auto element = ptx::Element::tf32;
    static constexpr int slice_count = 2;
    /// Elements of K in one product instruction.
    static constexpr int instruction_k = 8;
    static constexpr bool scaled = false;
    static constexpr int stages = 4;
    static constexpr int parts = Parts;
    __device__ static constexpr int products_in(int) {
        return 12 / Parts;
    }
    /// The product number `i` of a part: the small ones first.
    __device__ static constexpr Product product(int part, int i) {
        constexpr int instructions = 4 / Parts;
        constexpr Product products[] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 0}};
        auto result = products[i / instructions];
        result.instruction = part * instructions + i % instructions;
        return result;
    }
    /// 16-byte pieces that a slice of one row of the packed weight has in a step of K.
    static constexpr int pieces = 8;
    static constexpr int weight_row_bytes = 256;

    /// Fragments of the elements of row `row`, of two, of a thread.
    __device__ static void
    split(const float (&x)[8], int row, uint32_t (&fragments)[slice_count][16], float &) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            auto hi = round_to_tf32(x[i]);
            // The hardware cuts the low slice off after 10 bits. Half a unit of the last one is
            // between 0.5 and 1 times 2⁻¹¹ of the value: with 0.71, cutting off is all but rounding
            // to nearest. Unlike an integer addition it leaves NaN alone.
            auto lo = (x[i] - hi) * 1.000345267f;
            auto place = 4 * (i / 2) + 2 * (i % 2) + row;
            fragments[0][place] = slices::bits(hi);
            fragments[1][place] = slices::bits(lo);
        }
    }

    /// Offset in a step of K of the element `i` of a 16-byte piece of the packed weight.
    __host__ __device__ static constexpr int weight_column(int piece, int i) {
        return 8 * i + piece;
    }

    /// Slices of the elements of a piece, as 16 bytes each.
    __device__ static void pack(const float (&w)[4], uint4 (&packed)[slice_count]) {
        float hi[4], lo[4];
        for (int i = 0; i < 4; i++) {
            hi[i] = round_to_tf32(w[i]);
            lo[i] = w[i] - hi[i];
            lo[i] = isfinite(lo[i]) ? round_to_tf32(lo[i]) : lo[i];
        }
        packed[0] = *reinterpret_cast<uint4 *>(hi);
        packed[1] = *reinterpret_cast<uint4 *>(lo);
    }

    /// Where a piece of a slice of a row is in the packed tile of `tile_n` rows: with the 128-byte
    /// swizzle of the hardware.
    template <int TileN>
    __host__ __device__ static constexpr int offset(int slice, int row, int piece) {
        return slice * TileN * 128 + row * 128 + ((piece ^ (row & 7)) * 16);
    }

    /// Descriptor of a slice for the instruction `step` of a step of K, without the address of the
    /// tile.
    template <int TileN> __device__ static constexpr uint64_t descriptor(int slice, int step) {
        return (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16) |
               uint64_t((slice * TileN * 128 + step * 32) >> 4);
    }
};

struct Tf32x3 : Tf32x3InParts<1> {
    static constexpr auto kernel = Kernel::wgmma_tf32x3;
};
struct Tf32x3TwoParts : Tf32x3InParts<2> {
    static constexpr auto kernel = Kernel::wgmma_tf32x3_two_parts;
};

/// What the modes of 16-bit slices have in common: the order of K, if rows are sliced in registers,
/// and where slices are packed. The first two share rows of 128 bytes, a third one has rows of 64
/// bytes behind them.
struct SixteenBit {
    static constexpr int instruction_k = 16;
    static constexpr int pieces = 4;

    __host__ __device__ static constexpr int weight_column(int piece, int i) {
        return 8 * (i / 2) + 2 * piece + i % 2;
    }

    template <int TileN>
    __host__ __device__ static constexpr int offset(int slice, int row, int piece) {
        return slice < 2 ? row * 128 + (((4 * slice + piece) ^ (row & 7)) * 16)
                         : TileN * 128 + row * 64 + ((piece ^ ((row >> 1) & 3)) * 16);
    }

    template <int TileN> __device__ static constexpr uint64_t descriptor(int slice, int step) {
        return slice < 2 ? (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16) |
                               uint64_t((slice * 64 + step * 32) >> 4)
                         : (uint64_t(2) << 62) | (uint64_t(32) << 32) | (uint64_t(1) << 16) |
                               uint64_t((TileN * 128 + step * 32) >> 4);
    }
};

/// Two FP16 slices, the low one scaled by 2¹¹, and three products. FP16 has too few exponents: each
/// row and step of K is scaled by the power of two that brings its largest element to [2¹⁴, 2¹⁵),
/// and each row of the weight likewise over the whole of K.
struct Fp16Slices : SixteenBit {
    static constexpr int slice_count = 2;
    static constexpr bool scaled = true;
    static constexpr int weight_row_bytes = 128;
    static constexpr float low_scale = 2048;

    /// 2ˢ for numbers whose largest magnitude is `largest`, such that it and its inverse are
    /// normal.
    __device__ static float scale(float largest) {
        auto exponent = slices::bits(largest) & 0x7f800000u;
        return __uint_as_float(min(0x86000000u - exponent, 0x7e800000u));
    }

    __device__ static float inverse_of(float scale) {
        return __uint_as_float(0x7f000000u - slices::bits(scale));
    }

    /// Scales the eight elements that each thread of a quad has of a row. Returns what undoes it.
    __device__ static float scale_row(float (&x)[8]) {
        auto largest = fabsf(x[0]);
#pragma unroll
        for (int i = 1; i < 8; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        auto factor = scale(largest);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] *= factor;
        }
        return inverse_of(factor);
    }

    /// The slices of two scaled numbers.
    __device__ static void slice(float first, float second, uint32_t (&pairs)[slice_count]) {
        auto hi = __floats2half2_rn(first, second);
        auto lo = __floats2half2_rn(
            (first - __low2float(hi)) * low_scale, (second - __high2float(hi)) * low_scale
        );
        pairs[0] = slices::pack(hi);
        pairs[1] = slices::pack(lo);
    }

    /// Slices of the scaled elements of a 16-byte piece.
    __device__ static void pack(const float (&w)[8], uint4 (&packed)[slice_count]) {
        uint32_t pairs[4][slice_count];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            slice(w[2 * i], w[2 * i + 1], pairs[i]);
        }
#pragma unroll
        for (int s = 0; s < slice_count; s++) {
            packed[s] = {pairs[0][s], pairs[1][s], pairs[2][s], pairs[3][s]};
        }
    }
};

/// Rows are sliced in registers.
struct Fp16x3 : Fp16Slices {
    static constexpr auto kernel = Kernel::wgmma_fp16x3;
    static constexpr auto element = ptx::Element::f16;
    static constexpr int stages = 6;
    /// The parts have different scales: hi·hi, and the products with a low slice.
    static constexpr int parts = 2;
    __device__ static constexpr int products_in(int part) {
        return part == 0 ? 2 : 4;
    }
    __device__ static constexpr Product product(int part, int i) {
        constexpr Product products[] = {
            {0, 0, 0}, {0, 0, 1}, {1, 0, 0}, {1, 0, 1}, {0, 1, 0}, {0, 1, 1}
        };
        return products[2 * part + i];
    }
    __device__ static constexpr float part_scale(int part) {
        return part == 0 ? 1 : 1 / low_scale;
    }

    /// As above; `inverse` undoes the scale of the row.
    __device__ static void
    split(float (&x)[8], int row, uint32_t (&fragments)[slice_count][8], float &inverse) {
        inverse = scale_row(x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pairs[slice_count];
            slice(x[2 * i], x[2 * i + 1], pairs);
            auto place = 4 * (i / 2) + 2 * (i % 2) + row;
            fragments[0][place] = pairs[0];
            fragments[1][place] = pairs[1];
        }
    }
};

/// Rows are sliced in shared memory, with K in the order of memory.
struct Fp16x3Shared : Fp16Slices {
    static constexpr auto kernel = Kernel::wgmma_fp16x3_shared_slices;
    __host__ __device__ static constexpr int weight_column(int piece, int i) {
        return 8 * piece + i;
    }
};

/// Three BF16 slices and the `Products` largest of their products, in `Parts` parts as above.
template <int Products, int Parts> struct Bf16 : SixteenBit {
    static constexpr auto element = ptx::Element::bf16;
    static constexpr int slice_count = 3;
    static constexpr bool scaled = false;
    static constexpr int stages = 5;
    static constexpr int parts = Parts;
    static constexpr int weight_row_bytes = 192;
    __device__ static constexpr int products_in(int) {
        return 2 * Products / Parts;
    }
    /// The product number `i` of a part: the small ones first.
    __device__ static constexpr Product product(int part, int i) {
        constexpr int instructions = 2 / Parts;
        auto pair = bf16_product(9 - Products + i / instructions);
        return {pair.rows, pair.weight, part * instructions + i % instructions};
    }

    /// Slices of two numbers.
    __device__ static void slice(float first, float second, uint32_t (&pairs)[slice_count]) {
#pragma unroll
        for (int i = 0; i < slice_count; i++) {
            auto pair = slices::pack(__floats2bfloat162_rn(first, second));
            pairs[i] = pair;
            first -= __uint_as_float(pair << 16);
            second -= __uint_as_float(pair & 0xffff0000u);
        }
    }

    __device__ static void
    split(const float (&x)[8], int row, uint32_t (&fragments)[slice_count][8], float &) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pairs[slice_count];
            slice(x[2 * i], x[2 * i + 1], pairs);
#pragma unroll
            for (int s = 0; s < slice_count; s++) {
                fragments[s][4 * (i / 2) + 2 * (i % 2) + row] = pairs[s];
            }
        }
    }

    __device__ static void pack(const float (&w)[8], uint4 (&packed)[slice_count]) {
        uint32_t words[slice_count][4];
        for (int i = 0; i < 4; i++) {
            uint32_t pairs[slice_count];
            slice(w[2 * i], w[2 * i + 1], pairs);
            for (int s = 0; s < slice_count; s++) {
                words[s][i] = pairs[s];
            }
        }
        for (int s = 0; s < slice_count; s++) {
            packed[s] = *reinterpret_cast<uint4 *>(words[s]);
        }
    }
};

struct Bf16x6 : Bf16<6, 1> {
    static constexpr auto kernel = Kernel::wgmma_bf16x6;
};
struct Bf16x6TwoParts : Bf16<6, 2> {
    static constexpr auto kernel = Kernel::wgmma_bf16x6_two_parts;
};
struct Bf16x9 : Bf16<9, 1> {
    static constexpr auto kernel = Kernel::wgmma_bf16x9;
};
struct Bf16x9TwoParts : Bf16<9, 2> {
    static constexpr auto kernel = Kernel::wgmma_bf16x9_two_parts;
};

} // namespace metatomic_tc::wgmma
