"""Runs every CUDA kernel of the operators once on small and odd shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/odd_products.py
    compute-sanitizer --tool racecheck python benchmarks/odd_products.py

Shapes with tails in M, N and K, unaligned rows, one row, several tiles for one block, rows for each
multiprocessor, K in several parts, Inf in the input, and the activations.
"""

import metatomic_tc
import metatomic_tc.modes
import torch

SHAPES = [
    (1, 16, 16),
    (130, 65, 33),
    (64, 17, 130),
    (300, 200, 96),
    (20, 128, 1056),
    (34000, 136, 200),
]


def main():
    modes = [mode for mode in metatomic_tc.supported_modes("cuda") if mode not in ("fp32", "tf32")]
    operators = torch.ops.metatomic_tc
    count = 0
    for mode in modes:
        for M, N, K in SHAPES:
            rows = torch.randn(M, K + 1, device="cuda")[:, :K]  # rows are not aligned
            weight, bias = torch.randn(N, K, device="cuda"), torch.randn(N, device="cuda")
            output = operators.linear(rows, weight, bias, mode)
            operators.linear(rows.contiguous(), weight, None, mode)
            operators.linear_input_gradient(output, weight, mode)
            even = N // 2 * 2
            for activation in ("silu", "swiglu"):
                operators.linear_activation_forward(
                    rows, weight[:even], bias[:even], activation, mode
                )
            count += 5
        rows = torch.randn(130, 64, device="cuda")
        rows[7, 3] = float("inf")
        operators.linear(rows, torch.randn(40, 64, device="cuda"), None, mode)
    kernels = {
        rule["kernel"]
        for rule in metatomic_tc.modes.kernel_table()
        if rule["kernel"].startswith("wgmma") and rule["mode"] in modes
    }
    for kernel in sorted(kernels):
        tilings = [(64, 1), (64, 3), (128, 1), (128, 3)]
        for tile_n, splits in [(128, 1)] if kernel.endswith("shared-slices") else tilings:
            rows, weight = torch.randn(2, 200, 224, device="cuda")
            operators.gemm(rows, weight, None, True, kernel, tile_n, splits)
            count += 1
    # more tiles than multiprocessors
    operators.linear(
        torch.randn(20000, 64, device="cuda"), torch.randn(128, 64, device="cuda"), None, modes[0]
    )
    torch.cuda.synchronize()
    print(f"{count + 1} products in the modes {', '.join(modes)}")


if __name__ == "__main__":
    main()
