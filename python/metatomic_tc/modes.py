"""What the operator library says about modes and devices. All decisions are in its one table."""

import json
from typing import Any

import torch

#: The mode used where none is given.
DEFAULT_MODE = "tf32x3"


def supported_modes(device: str | torch.device = "cpu") -> list[str]:
    """
    The modes that linear layers can use on a device.

    On the CPU every mode is supported, but emulated: the same slices and products as on a GPU,
    each product by FP32 BLAS. That is for testing and is slower than ``fp32``.

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
    torch.ops.metatomic_tc.select_implementation(mode, False, 0, 0, 128, 128, 128)


def hardware(device: str | torch.device) -> dict[str, Any]:
    """
    A device as the dispatch table sees it.

    :return: ``cuda`` (bool), ``compute_capability`` (10·major + minor, 0 on the CPU),
        ``cuda_version`` (1000·major + 10·minor, 0 on the CPU) and ``name``
    :raises RuntimeError: for devices other than the CPU and CUDA, or a missing CUDA device
    """
    return json.loads(torch.ops.metatomic_tc.hardware(torch.device(device)))


def dispatch_table() -> list[dict[str, Any]]:
    """The rows of the table that chooses the implementation, the first that fits decides."""
    return json.loads(torch.ops.metatomic_tc.dispatch_table())


def build_info() -> dict[str, Any]:
    """
    How the operator library was built: ``version``, ``torch``, ``cuda_architectures`` (empty
    without CUDA), with CUDA ``cuda_version`` (as in :func:`hardware`), ``minimum_features`` (layers
    with fewer input or output features stay in FP32), and ``largest_head_size`` (the most columns
    of a head of PET's attention on a GPU).
    """
    return json.loads(torch.ops.metatomic_tc.build_info())
