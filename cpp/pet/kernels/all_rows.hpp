#pragma once

#include "edges.hpp"
#include "tokens.hpp"

/// All row operations, for explicit instantiations of `launch_rows`.
#define METATOMIC_TC_FOR_ALL_ROWS_OF(apply, T)                                                     \
    apply(ClearSpareRows<T>) apply(AdaptiveCutoffs<T>) apply(AdaptiveCutoffsBackward<T>)           \
        apply(SystemSums<T>) apply(SelectEdges<T>) apply(EdgeVectors<T>)                           \
            apply(EdgeVectorsBackward<T>) apply(CutoffFactors<T>) apply(CutoffFactorsBackward<T>)  \
                apply(ConcatenatedNorm<T>) apply(ConcatenatedNormBackward<T>)                      \
                    apply(ResidualNorm<T>) apply(ResidualNormBackward<T>)                          \
                        apply(ReversedPairNorm<T>) apply(ReversedPairNormBackward<T>)              \
                            apply(EdgeTokens<T>) apply(EdgeTokensBackward<T>) apply(SegmentSum<T>) \
                                apply(SegmentSumBackward<T>) apply(AverageReversed<T>)             \
                                    apply(GluBackward<T>) apply(Sum<T>)

#define METATOMIC_TC_FOR_ALL_ROWS(apply)                                                           \
    METATOMIC_TC_FOR_ALL_ROWS_OF(apply, float)                                                     \
    METATOMIC_TC_FOR_ALL_ROWS_OF(apply, double)                                                    \
    apply(ReverseEdges)
