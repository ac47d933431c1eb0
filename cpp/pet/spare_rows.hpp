#pragma once

#include <algorithm>

#include "pet/kernels/spare_rows.hpp"
#include "rows/run.hpp"

namespace metatomic_tc::pet {

/// Sets the rows of `data` [offset + edges, ...] for which there are no edges to 0.
template <class T>
void clear_spare_rows(const at::Tensor &data, const at::Tensor &row_starts, int64_t offset) {
    constexpr int64_t parts = 1024;
    auto rows = data.size(0);
    if (rows == 0) {
        return;
    }
    auto clear = ClearSpareRows<T>{
        .row_starts = pointer<int>(row_starts),
        .atoms = row_starts.numel() - 1,
        .offset = offset,
        .rows = rows,
        .width = data.numel() / rows,
        .count = std::min(rows, parts),
        .data = output<T>(data)
    };
    run(clear, clear.count, data);
}

} // namespace metatomic_tc::pet
