#pragma once

#include "rows/rows.hpp"

namespace metatomic_tc {

/// The gradient of the columns of `product` [rows, 2 width], which are values and then gates, from
/// that of `values * sigmoid(gates)`.
template <class T> struct GluBackward {
    /// [rows, width]
    const T *gradient;
    const T *product;
    int width;
    /// like `product`
    T *output;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t row, Lanes lanes) const {
        auto *upper = gradient + row * width, *values = product + row * 2 * width;
        auto *result = output + row * 2 * width;
        for (int c = lanes.index(); c < width; c += lanes.count) {
            auto part = rows::sigmoid(rows::read(values + width + c));
            auto value = part * rows::read(upper + c);
            result[c] = value;
            result[width + c] = (1 - part) * value * rows::read(values + c);
        }
    }
};

} // namespace metatomic_tc
