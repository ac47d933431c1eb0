#pragma once

#include "edges.hpp"
#include "spare_rows.hpp"
#include "tokens.hpp"

/// All row operations of PET, for explicit instantiations of `launch_rows` in its namespace.
#define METATOMIC_TC_FOR_ALL_ROWS_OF(apply, T)                                                     \
    apply(pet::ClearSpareRows<T>) apply(pet::AdaptiveCutoffs<T>)                                   \
        apply(pet::AdaptiveCutoffsBackward<T>) apply(pet::SystemSums<T>)                           \
            apply(pet::SelectEdges<T>) apply(pet::EdgeVectors<T>)                                  \
                apply(pet::EdgeVectorsBackward<T>) apply(pet::CutoffFactors<T>)                    \
                    apply(pet::CutoffFactorsBackward<T>) apply(pet::ConcatenatedNorm<T>)           \
                        apply(pet::ConcatenatedNormBackward<T>) apply(pet::ResidualNorm<T>)        \
                            apply(pet::ResidualNormBackward<T>) apply(pet::ReversedPairNorm<T>)    \
                                apply(pet::ReversedPairNormBackward<T>) apply(pet::EdgeTokens<T>)  \
                                    apply(pet::EdgeTokensBackward<T>) apply(pet::SegmentSum<T>)    \
                                        apply(pet::SegmentSumBackward<T>)                          \
                                            apply(pet::AverageReversed<T>) apply(pet::Sum<T>)

#define METATOMIC_TC_FOR_ALL_ROWS(apply)                                                           \
    METATOMIC_TC_FOR_ALL_ROWS_OF(apply, float)                                                     \
    METATOMIC_TC_FOR_ALL_ROWS_OF(apply, double)                                                    \
    apply(pet::ReverseEdges)
