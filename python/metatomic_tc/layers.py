"""The linear operators and the layer made of them."""

import torch

from .modes import DEFAULT_MODE, check_mode


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    mode: str = DEFAULT_MODE,
) -> torch.Tensor:
    """
    ``input · weightᵀ + bias`` in the given mode, differentiable twice.

    The gradient with respect to ``input`` is computed in the same mode, those with respect to
    ``weight`` and ``bias`` by plain PyTorch. Layers too small to gain are computed in FP32.

    :param input: ``[..., in_features]``, float32 or float64. In float64 everything is computed in
        FP64, whatever the mode.
    :param weight: ``[out_features, in_features]``, dtype and device of ``input``
    :param bias: ``[out_features]``, or None
    :param mode: how the operands are multiplied, see docs/modes.md
    :return: ``[..., out_features]``, contiguous, dtype of ``input``
    :raises TypeError: on other or mixed dtypes
    :raises ValueError: on shapes that do not match, or if there is no such mode
    :raises RuntimeError: on tensors of different devices, or a mode that the device does not
        support (the message names the modes that it does)
    """
    return torch.ops.metatomic_tc.linear(input, weight, bias, mode)


def linear_activation(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    mode: str = DEFAULT_MODE,
) -> torch.Tensor:
    """
    A linear layer with the activation that follows it, in the given mode, differentiable twice.

    With ``z = input · weightᵀ + bias``, ``silu`` is ``z · sigmoid(z)``, and ``swiglu`` is
    ``v · sigmoid(g)`` for the halves ``v, g = z.chunk(2, -1)``. Gradients are as those of
    :func:`linear`; the activation and its gradients are computed in FP32. ``z`` is kept only where
    a gradient will need it.

    :param input: see :func:`linear`, as ``weight``, ``bias`` and ``mode``
    :param activation: ``silu`` or ``swiglu``
    :return: ``[..., out_features]``, or ``[..., out_features / 2]`` with ``swiglu``; contiguous,
        dtype of ``input``
    :raises TypeError: on other or mixed dtypes
    :raises ValueError: on shapes that do not match, an odd number of output features with
        ``swiglu``, or if there is no such activation or mode
    :raises RuntimeError: on tensors of different devices, or a mode that the device does not
        support (the message names the modes that it does)
    """
    return torch.ops.metatomic_tc.linear_activation(input, weight, bias, activation, mode)


class TCLinear(torch.nn.Linear):
    """
    A :class:`torch.nn.Linear` that computes in the given mode. Parameters and state dictionary are
    those of ``torch.nn.Linear``; TorchScript and ``torch.compile`` work.

    :param in_features: size of the last dimension of the input
    :param out_features: size of the last dimension of the output
    :param bias: whether the layer has a bias
    :param mode: see :func:`linear`
    :param device: device of the parameters
    :param dtype: float32 or float64
    :raises ValueError: if there is no such mode
    """

    __constants__ = ["in_features", "out_features", "mode"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mode: str = DEFAULT_MODE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        check_mode(mode)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.mode = mode

    @classmethod
    def from_linear(cls, layer: torch.nn.Linear, mode: str = DEFAULT_MODE) -> "TCLinear":
        """
        A layer that shares the parameters of ``layer``.

        :raises TypeError: if ``layer`` is not a ``torch.nn.Linear``
        :raises ValueError: if there is no such mode
        """
        if not isinstance(layer, torch.nn.Linear):
            raise TypeError(f"expected a torch.nn.Linear, got {type(layer).__name__}")
        new = cls(layer.in_features, layer.out_features, bias=False, mode=mode, device="meta")
        new.weight = layer.weight
        new.bias = layer.bias
        return new.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """
        :param input: ``[..., in_features]``
        :return: ``[..., out_features]``
        """
        return torch.ops.metatomic_tc.linear(input, self.weight, self.bias, self.mode)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}"
