#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/script.h>

#include "metatomic_tc/hardware.hpp"
#include "metatomic_tc/modes.hpp"

namespace metatomic_tc {

/// One linear layer of a TorchScript module.
struct LinearLayer {
    /// Where it is, e.g. "module.backend.gnn_layers.0.compress.2".
    std::string path;
    /// -1 when the weight is computed at run time, so that the shape is not known yet.
    int64_t in_features;
    int64_t out_features;
    /// true when the layer computes in the requested mode, false when it stays in FP32.
    bool replaced;
};

/// A shell-style pattern for the paths of layers: `*` is any text, dots included, `?` any character
/// and `[...]` one of a set; with `!` in front, all paths that the rest does not match.
class LayerPattern {
  public:
    /// @throws std::invalid_argument when there is no pattern
    explicit LayerPattern(std::string pattern);

    /// true for "*"
    bool matches_all() const;
    bool matches(const std::string &path) const;

  private:
    std::string pattern_;
    bool inverted_ = false;
};

/// One attention of PET with the backend of metatomic-tc.
struct AttentionLayer {
    /// Of its module.
    std::string path;
    /// Columns of a head; -1 where they are not known before it runs.
    int64_t head_size;
    Mode mode;
};

struct ConversionReport {
    Mode mode;
    std::vector<LinearLayer> layers;
    std::vector<AttentionLayer> attention;
    /// Number of activations that became one operator with the layer before them.
    int64_t fused = 0;

    /// Number of layers that compute in `mode`.
    int64_t replaced() const;
    /// Number of layers that stay in FP32: too small (see `stays_fp32`), or not chosen.
    int64_t left() const;
    /// What is wrong with the pattern `layers` that chose them: it chose none that uses the mode.
    /// "" if it did, or is "*".
    /// @param file for the message; "" if there is none
    std::string problem(const std::string &layers, const std::string &file) const;
    /// What computes a layer on `hardware` for a million rows: its forward and, if that is
    /// another, its input gradient. Nothing where the shape is not known before the run, or the
    /// hardware does not support the mode.
    std::vector<std::string> kernels(const LinearLayer &layer, const Hardware &hardware) const;
    /// What computes an attention; "" where its heads are not known before the run.
    std::string kernel(const AttentionLayer &layer, const Hardware &hardware) const;
    /// What computes all layers in `mode` and all attention, each name once.
    std::vector<std::string> kernels(const Hardware &hardware) const;
};

/// Rewrites every `aten::linear` and `metatomic_tc::linear` of `module` (all nested modules and
/// methods) into `metatomic_tc::linear` with the given mode, in place. Must be called before the
/// module runs for the first time. Layers that are too small to gain call the operator too, which
/// computes them in FP32; the report counts them as left.
///
/// In every mode but `fp32`, a layer whose result goes to `silu` only, or to `chunk(2, -1)` and
/// `v * sigmoid(g)` of the halves, becomes one `metatomic_tc::linear_activation` with it. In `fp32`
/// these are separated again, so that the module computes what it did before any conversion, bit by
/// bit.
///
/// `layers` chooses the layers that compute in the mode, as in `LayerPattern`; the others call the
/// operator in FP32. The attention of PET with the backend of metatomic-tc is given the mode, too,
/// if all layers are chosen.
ConversionReport
convert_linear_layers(torch::jit::Module &module, Mode mode, const std::string &layers = "*");

} // namespace metatomic_tc
