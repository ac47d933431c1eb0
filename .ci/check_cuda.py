"""Checks in the disassembly that the kernels of a built library run on Tensor Cores.

    check_cuda.py libmetatomic_tc_kernels.a 80 90a 100

For every architecture: the library holds TF32x3 kernels for it, BF16x6 and BF16x9 ones except for
compute capability 10.x and 11.x, for 90a also those by wgmma and FP16x3, and each of them has
Tensor Core instructions on the operands of its name, a multiple of the number of its products.
Needs `cuobjdump` and `nvdisasm` of the CUDA toolkit on PATH.
"""

import re
import subprocess
import sys
from typing import NamedTuple


class Family(NamedTuple):
    """Kernels of one number of products."""

    #: in the mangled name of the kernel
    kernel: re.Pattern
    instruction: re.Pattern
    products: int


def bf16(products):
    return Family(
        re.compile(rf"mma_bf16\d+multiply_kernelILi{products}E"),
        # e.g. HMMA.16816.F32.BF16
        re.compile(r"\bHMMA\.\S*BF16\S*"),
        products,
    )


def wgmma(mode, instruction, products):
    return Family(
        re.compile(rf"wgmma(?:\d+shared_slices)?\d+multiply_kernelINS0_\d+{mode}\w*ELi"),
        re.compile(rf"\bHGMMA\.64x\d+x{instruction}\b(?!\.)"),
        products,
    )


FAMILIES = {
    "TF32x3": Family(
        # the multiply-add operator of CUTLASS
        re.compile(r"FastF32"),
        # e.g. HMMA.1688.F32.TF32
        re.compile(r"\b(?:HMMA|HGMMA|UTCHMMA|UTCQMMA)\.\S*TF32\S*"),
        3,
    ),
}
#: empty for compute capability 10.x and 11.x, where cuBLAS has BF16x9
BF16_FAMILIES = {"BF16x6": bf16(6), "BF16x9": bf16(9)}
#: only for compute capability 9.0a
WGMMA_FAMILIES = {
    "wgmma TF32x3": wgmma("Tf32x3", r"8\.F32\.TF32", 3),
    # two instructions of hi·hi stand alone, before the loop
    "wgmma FP16x3": wgmma("Fp16x3", r"16\.F32", 2),
    "wgmma BF16x6": wgmma("Bf16x6", r"16\.F32\.BF16", 6),
    "wgmma BF16x9": wgmma("Bf16x9", r"16\.F32\.BF16", 9),
}


def families(architecture):
    result = dict(FAMILIES)
    if not architecture.startswith(("10", "11")):
        result |= BF16_FAMILIES
    if architecture == "90a":
        result |= WGMMA_FAMILIES
    return result


def tensor_core_instructions(library, architecture):
    """{family: {kernel: {instruction: count}}} for one architecture."""
    command = ["cuobjdump", "-sass", "-arch", f"sm_{architecture}", library]
    kernels = {family: {} for family in families(architecture)}
    kernel, instruction = None, None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "Function : " in line:
                name = line.split("Function : ")[1].strip()
                kernel = None
                for name_of_family, family in families(architecture).items():
                    if family.kernel.search(name):
                        kernel = kernels[name_of_family].setdefault(name, {})
                        instruction = family.instruction
            elif kernel is not None and (found := instruction.search(line)):
                kernel[found.group()] = kernel.get(found.group(), 0) + 1
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with code {process.returncode}")
    return kernels


def check(library, architecture):
    """{family: number of kernels}; exits when one of them does not use Tensor Cores."""
    numbers = {}
    for family, kernels in tensor_core_instructions(library, architecture).items():
        products = families(architecture)[family].products
        if not kernels:
            sys.exit(f"{library} has no {family} kernel for sm_{architecture}")
        for name, instructions in kernels.items():
            if not instructions:
                sys.exit(f"sm_{architecture}: no Tensor Core instruction of {family} in {name}")
            if sum(instructions.values()) % products:
                sys.exit(
                    f"sm_{architecture}: not a multiple of {products} instructions: "
                    f"{name}, {instructions}"
                )
        counts = sorted(sum(instructions.values()) for instructions in kernels.values())
        names = sorted(
            {instruction for instructions in kernels.values() for instruction in instructions}
        )
        print(
            f"sm_{architecture}: {len(kernels)} {family} kernels, "
            f"each with {counts[0]} to {counts[-1]} of {', '.join(names)}"
        )
        numbers[family] = len(kernels)
    return numbers


def main(library, *architectures):
    numbers = {architecture: check(library, architecture) for architecture in architectures}
    for family in FAMILIES | BF16_FAMILIES:
        found = {a: counts[family] for a, counts in numbers.items() if family in counts}
        if len(set(found.values())) > 1:
            sys.exit(f"not every architecture has the same number of {family} kernels: {found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
