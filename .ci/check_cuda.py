"""Checks in the disassembly that the TF32x3 kernels of a built library run on Tensor Cores.

    check_cuda.py libmetatomic_tc.so 80 90a 100

For every architecture: the library holds TF32x3 kernels for it, and each of them has Tensor Core
instructions on TF32 operands, a multiple of three (hi·hi, hi·lo, lo·hi). Needs `cuobjdump` and
`nvdisasm` of the CUDA toolkit on PATH.
"""

import re
import subprocess
import sys

# the multiply-add operator of CUTLASS in the mangled name of the kernel
TF32X3_KERNEL = re.compile(r"FastF32")
# e.g. HMMA.1688.F32.TF32
TF32_INSTRUCTION = re.compile(r"\b(?:HMMA|HGMMA|UTCHMMA|UTCQMMA)\.\S*TF32\S*")


def tensor_core_instructions(library, architecture):
    """{kernel: {instruction: count}} of the TF32x3 kernels for one architecture."""
    command = ["cuobjdump", "-sass", "-arch", f"sm_{architecture}", library]
    kernels, kernel = {}, None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "Function : " in line:
                name = line.split("Function : ")[1].strip()
                kernel = kernels.setdefault(name, {}) if TF32X3_KERNEL.search(name) else None
            elif kernel is not None and (found := TF32_INSTRUCTION.search(line)):
                kernel[found.group()] = kernel.get(found.group(), 0) + 1
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with code {process.returncode}")
    return kernels


def check(library, architecture):
    """The number of TF32x3 kernels; exits when one of them does not use Tensor Cores."""
    kernels = tensor_core_instructions(library, architecture)
    if not kernels:
        sys.exit(f"{library} has no TF32x3 kernel for sm_{architecture}")
    for name, instructions in kernels.items():
        if not instructions:
            sys.exit(f"sm_{architecture}: no Tensor Core instruction on TF32 operands in {name}")
        if sum(instructions.values()) % 3:
            sys.exit(
                f"sm_{architecture}: not three instructions per product: {name}, {instructions}"
            )
    counts = sorted(sum(instructions.values()) for instructions in kernels.values())
    names = sorted(
        {instruction for instructions in kernels.values() for instruction in instructions}
    )
    print(
        f"sm_{architecture}: {len(kernels)} TF32x3 kernels, "
        f"each with {counts[0]} to {counts[-1]} of {', '.join(names)}"
    )
    return len(kernels)


def main(library, *architectures):
    numbers = {architecture: check(library, architecture) for architecture in architectures}
    if len(set(numbers.values())) != 1:
        sys.exit(f"not every architecture has the same number of TF32x3 kernels: {numbers}")


if __name__ == "__main__":
    main(*sys.argv[1:])
