"""What computes a product: cuBLAS, CUTLASS, Triton and the modes of this library."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import modes
from .cases import Case


class Product(NamedTuple):
    """A way to compute a product, ready to be timed."""

    #: what runs on the device
    kernel: str
    #: from A and W (``Case.weight_shape``) to a new C
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Implementations:
    """
    The implementations that a device has.

    :param device: a CPU or CUDA device
    :param selected: modes of the library to measure; fp32 and tf32 always are
    """

    def __init__(self, device: torch.device, selected: list[str]):
        self._hardware = modes.hardware(device)
        on_gpu = self._hardware["cuda"]
        #: the one that others are compared with
        self.baseline = "cublas-fp32" if on_gpu else "cpu-fp32"
        self._prepare = {self.baseline: self._torch}
        supported = modes.supported_modes(device)
        if "tf32" in supported:
            self._prepare["cublas-tf32" if on_gpu else "cpu-tf32"] = self._mode("tf32")
        if on_gpu and "tf32x3" in supported:
            self._prepare["cutlass-3xtf32"] = self._cutlass
            self._prepare["triton-tf32x3"] = self._triton
        for mode in selected:
            if mode not in ("fp32", "tf32"):
                self._prepare[mode] = self._mode(mode)

    @property
    def names(self) -> list[str]:
        """Their names, the baseline first."""
        return list(self._prepare)

    def prepare(self, name: str, case: Case, a: torch.Tensor, w: torch.Tensor) -> Product:
        """
        Get an implementation ready for a product.

        :param a: a matrix A of the size, for implementations that try what is fastest
        :param w: a weight of the size
        :raises Exception: if it cannot compute this product here
        """
        return self._prepare[name](case, a, w)

    def _plan(self, mode: str, case: Case, **other_hardware: int) -> dict:
        return modes.plan(
            mode,
            self._hardware | other_hardware,
            case.M,
            case.N,
            case.K,
            forward=case.direction == "forward",
        )

    def _torch(self, case: Case, a: torch.Tensor, w: torch.Tensor) -> Product:
        # TF32 is off: see `full_fp32` in gemm.py.
        kernel = self._plan("fp32", case)["name"]
        if case.direction == "forward":
            return Product(kernel, lambda a, w: torch.mm(a, w.t()))
        return Product(kernel, torch.mm)

    def _mode(self, mode: str) -> Callable:
        def prepare(case: Case, a: torch.Tensor, w: torch.Tensor) -> Product:
            operators = torch.ops.metatomic_tc
            kernel = self._plan(mode, case)["name"]
            if case.direction == "forward":
                return Product(kernel, lambda a, w: operators.linear(a, w, None, mode))
            return Product(kernel, lambda a, w: operators.linear_input_gradient(a, w, mode))

        return prepare

    def _cutlass(self, case: Case, a: torch.Tensor, w: torch.Tensor) -> Product:
        # On compute capability 8.0 the table has nothing but CUTLASS's mma.sync kernels for tf32x3.
        kernel = self._plan("tf32x3", case, compute_capability=80)["kernel"]
        gemm, forward = torch.ops.metatomic_tc.gemm, case.direction == "forward"
        return Product(kernel, lambda a, w: gemm(a, w, None, forward, kernel))

    def _triton(self, case: Case, a: torch.Tensor, w: torch.Tensor) -> Product:
        try:
            from . import triton_tf32x3
        except ImportError as error:
            raise RuntimeError(f"Triton cannot be imported: {error}") from error
        forward = case.direction == "forward"
        tile = triton_tf32x3.fastest_tile(a, w, forward)
        return Product(f"triton {tile}", lambda a, w: triton_tf32x3.product(a, w, forward, tile))
