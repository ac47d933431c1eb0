"""What the operator library says about modes and devices. All decisions are in its one table."""

import json
from typing import Any

import torch

from .model_files import first_line

#: The mode used where none is given.
DEFAULT_MODE = "tf32x3"


def supported_modes(device: str | torch.device = "cpu") -> list[str]:
    """
    The modes that linear layers can use on a device.

    On the CPU every mode is supported, but emulated: the same slices and products as on a GPU,
    each product by FP32 BLAS. That is for testing and is slower than ``fp32``. So these are all
    modes that there are.

    :param device: a CPU or CUDA device, e.g. ``"cuda"`` or ``torch.device("cuda:1")``
    :return: names of modes, e.g. ``["fp32", "tf32", "tf32x3"]``
    :raises RuntimeError: for other devices, or when there is no such CUDA device
    """
    found = hardware(device)
    return json.loads(
        torch.ops.metatomic_tc.supported_modes(
            found["cuda"], found["compute_capability"], found["cuda_version"]
        )
    )


def check_mode(mode: str) -> None:
    """
    Check that there is a mode of this name, on whatever device.

    :raises ValueError: naming the mode and the valid ones
    """
    torch.ops.metatomic_tc.plan(mode, False, 0, 0, 0, 128, 128, 128)


def usable_device(device: str | torch.device) -> torch.device:
    """
    The device of a command line.

    :raises RuntimeError: if it cannot be used here, with the reason
    """
    try:
        device = torch.device(device)
        hardware(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"--device {device} cannot be used here: {first_line(str(error))}"
        ) from error
    return device


def expect_supported(names: list[str], device: str | torch.device) -> None:
    """
    Check that a device supports modes.

    :raises ValueError: naming the first one that it does not, and those that it does
    """
    supported = supported_modes(device)
    for mode in names:
        if mode not in supported:
            raise ValueError(
                f"found the mode '{mode}', but on {device} the choices are: {', '.join(supported)}"
            )


def hardware(device: str | torch.device) -> dict[str, Any]:
    """
    What a device is, as far as the choice of a kernel depends on it.

    :return: ``cuda`` (bool), ``compute_capability`` (10·major + minor, 0 on the CPU),
        ``cuda_version`` (1000·major + 10·minor, 0 on the CPU), ``multiprocessors`` (0 on the CPU)
        and ``name``
    :raises RuntimeError: for devices other than the CPU and CUDA, or a missing CUDA device
    """
    return json.loads(torch.ops.metatomic_tc.hardware(torch.device(device)))


def kernel_table() -> list[dict[str, Any]]:
    """The rows of the table that chooses the kernel of a product, the first that fits decides."""
    return json.loads(torch.ops.metatomic_tc.kernel_table())


def attention_table() -> list[dict[str, Any]]:
    """Where the attention of PET has its products on Tensor Cores."""
    return json.loads(torch.ops.metatomic_tc.attention_table())


def plan(
    mode: str,
    hardware: dict[str, Any],
    M: int,
    N: int,
    K: int,
    forward: bool = True,
    aligned: bool = True,
) -> dict[str, Any]:
    """
    How a product is computed: ``name`` says what really runs.

    :param hardware: of :func:`hardware`, or made up
    :param M, N, K: the product is ``[M, K]`` times ``[K, N]``
    :param forward: of a layer, else the gradient of its input
    :param aligned: whether operands begin at multiples of 16 bytes, and their rows
    :return: ``name``, ``kernel``, ``tile_n``, ``splits``, ``fuses_activation``, and in bytes
        ``workspace_size`` and ``packed_size``
    :raises RuntimeError: if the hardware does not support the mode
    """
    return json.loads(
        torch.ops.metatomic_tc.plan(
            mode,
            hardware["cuda"],
            hardware["compute_capability"],
            hardware["cuda_version"],
            hardware["multiprocessors"],
            M,
            N,
            K,
            forward,
            aligned,
        )
    )


def build_info() -> dict[str, Any]:
    """
    How the operator library was built: ``version``, ``torch``, ``cuda_architectures`` (empty
    without CUDA), with CUDA ``cuda_version`` (as in :func:`hardware`), ``minimum_features`` (layers
    with fewer input or output features stay in FP32), and ``largest_head_size`` (the most columns
    of a head of PET's attention on a GPU).
    """
    return json.loads(torch.ops.metatomic_tc.build_info())
