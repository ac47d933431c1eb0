#pragma once

#include "rows/rows.hpp"

namespace metatomic_tc::pet {

using namespace rows;

/// Sets the rows of `data` [rows, width] behind those of the last edge to 0. What works on edges by
/// their atoms does not reach them, and what works on all rows should find numbers there.
template <class T> struct ClearSpareRows {
    /// of the atoms; the last one is the number of edges
    const int *row_starts;
    int64_t atoms;
    /// in front of the first edge
    int64_t offset;
    int64_t rows, width;
    /// how many of this are called
    int64_t count;
    T *data;

    template <class Lanes>
    METATOMIC_TC_HOST_DEVICE void operator()(int64_t part, Lanes lanes) const {
        for (auto row = offset + row_starts[atoms] + part; row < rows; row += count) {
            for (int64_t column = lanes.index(); column < width; column += lanes.count) {
                data[row * width + column] = 0;
            }
        }
    }
};

} // namespace metatomic_tc::pet
