"""
Where an error comes from: the products of a model's own weights, in every mode, against FP64.

Activations are random, N(0, 1). Errors are in units of 2⁻²⁴·Σ|a·w|, where the sum is that of the
element: one unit is the most that a single rounding of the result to FP32 can cost.
"""

import torch

from .. import layers
from ..bench.gemm import Comparison

TEST = "layers"


def run(context) -> None:
    """Measure every shape of layer in every mode that is one of metatomic-tc."""
    shapes = _weights(context.evaluators)
    for mode in context.modes:
        actual = context.evaluators.mode_of(mode)
        for (inputs, outputs), weights in shapes.items():
            shape = f"{inputs} -> {outputs}"
            if actual is None or context.results.get(TEST, mode, shape):
                continue
            with context.guard(TEST, mode, shape):
                generator = torch.Generator().manual_seed(inputs * 100003 + outputs)
                found = []
                for weight in weights:
                    weight = weight.to(context.device)
                    rows = context.settings.layer_rows
                    x = torch.randn(rows, inputs, generator=generator).to(context.device)
                    compare = Comparison(
                        x, weight, "forward", torch.Generator(x.device).manual_seed(0)
                    )
                    with torch.no_grad():
                        found.append(compare(layers.linear(x, weight, None, actual)))
                result = {
                    "layers": len(found),
                    "error_rms": max(one["error_rms"] for one in found),
                    "error_max": max(one["error_max"] for one in found),
                    "error_mean": max((one["error_mean"] for one in found), key=abs),
                }
                context.results.put(TEST, mode, shape, result)


def _weights(evaluators) -> dict[tuple[int, int], list[torch.Tensor]]:
    """The FP32 weights of the layers that compute in a mode, by (in, out) features."""
    found: dict = {}
    parameters = dict(evaluators.model.named_parameters())
    for layer in evaluators.layers:
        if not layer.replaced or layer.in_features < 0:
            continue
        weight = parameters.get(f"{layer.path}.weight")
        if weight is not None and weight.dtype == torch.float32:
            found.setdefault((layer.in_features, layer.out_features), []).append(weight.detach())
    return dict(sorted(found.items()))
