#pragma once

namespace metatomic_tc {

/// TF32 keeps 10 bits of the mantissa; to nearest, ties away from zero. Wrong for the NaN whose
/// bits are all ones, which becomes a zero: the rest of the split is NaN then.
__device__ inline float round_to_tf32(float value) {
    return __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u);
}

} // namespace metatomic_tc
