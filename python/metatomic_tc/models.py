"""Metatomic models whose linear layers use a mode."""

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from metatomic.torch import (
    AtomisticModel,
    check_atomistic_model,
    is_atomistic_model,
    load_model_extensions,
)

from . import model_files
from .modes import DEFAULT_MODE, check_mode


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer of a model."""

    #: where it is, e.g. ``module.backend.gnn_layers.0.compress.2``
    path: str
    #: -1 when the weight is computed at run time, so that the shape is not known before
    in_features: int
    out_features: int
    #: True when it computes in the requested mode, False when it stays in FP32 since it is small or
    #: not among the layers that were asked for
    replaced: bool
    #: what computes it on the device of the report for a million rows: its forward and, if that is
    #: another, its input gradient; empty if the device does not support the mode
    kernels: list[str]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of PET with the backend of metatomic-tc."""

    #: of its module
    path: str
    #: columns of a head, -1 if that is not known before it runs
    head_size: int
    #: what computes it on the device of the report
    kernel: str


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` does to a model."""

    mode: str
    layers: list[LinearLayer]
    attention: list[AttentionLayer]
    #: number of activations that are computed together with the layer before them, none in ``fp32``
    fused: int
    #: why the pattern of layers is a mistake: it chose none that uses the mode; else empty
    problem: str = ""

    @property
    def replaced(self) -> int:
        """Number of layers that compute in ``mode``."""
        return sum(layer.replaced for layer in self.layers)

    @property
    def left(self) -> int:
        """Number of layers that stay in FP32: too small to gain, or not asked for."""
        return len(self.layers) - self.replaced

    def expect_any(self) -> None:
        """:raises ValueError: if the pattern of layers chose none that uses the mode"""
        if self.problem:
            raise ValueError(self.problem)


def load(
    path: str | Path,
    mode: str = DEFAULT_MODE,
    extensions_directory: str | Path | None = None,
    layers: str = "*",
) -> AtomisticModel:
    """
    Load an exported metatomic model, and let its linear layers use ``mode``.

    Plain ``mtt export`` files and models from ``metatomic-tc export`` (in whatever mode) work
    alike, and so do metatomic models that are not PET.

    :param path: an exported model, usually ``*.pt``
    :param mode: how its layers multiply, see docs/modes.md. Whether a device supports it is checked
        when the model runs there; see :func:`supported_modes`.
    :param extensions_directory: where the TorchScript extensions of the model are, if it has any
    :param layers: shell-style pattern for the paths of the layers that use the mode (see
        :func:`conversion_report`), with ``!`` in front: for those of all others. The rest computes
        in FP32.
    :return: the model on the CPU, to be used in any metatomic engine
    :raises ModelFileError: if the file is something else; the message says what, and what to do
    :raises ValueError: if there is no such mode, or ``layers`` chooses none that would use it
    :raises RuntimeError: if the file cannot be read
    """
    check_mode(mode)
    with _reading(path, extensions_directory):
        content, report = _converted(_tensor_of(Path(path).read_bytes()), mode, layers)
    report.expect_any()
    return _model_of(load_script_module(content))


def read_exported(
    path: str | Path, extensions_directory: str | Path | None = None
) -> AtomisticModel:
    """An exported model, as it is. Parameters and errors are those of :func:`load`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _reading(path, extensions_directory):
            module = torch.jit.load(str(path))
        return _model_of(module)


def convert(model: torch.nn.Module, mode: str = DEFAULT_MODE, layers: str = "*") -> AtomisticModel:
    """
    A copy of a metatomic model whose linear layers use ``mode``; ``model`` stays as it is.

    :param model: an :class:`AtomisticModel`, freshly exported or loaded from a file (whatever
        modes its layers use already), or what ``torch.jit.script`` makes of one
    :param mode: see :func:`load`
    :param layers: see :func:`load`
    :return: the new model, on the device of ``model``
    :raises TypeError: if ``model`` is not a metatomic model
    :raises ValueError: if there is no such mode, or ``layers`` chooses none that would use it
    """
    return convert_with_report(model, mode, layers)[0]


def conversion_report(
    model: torch.nn.Module, mode: str = DEFAULT_MODE, layers: str = "*"
) -> ConversionReport:
    """
    What ``convert(model, mode, layers)`` would do: every linear layer of the model, its shape,
    whether it would use the mode, and which kernel would compute it on the first GPU here, or on
    the CPU if there is none. ``model`` stays as it is.

    Parameters and errors are those of :func:`convert`.
    """
    return convert_with_report(model, mode, layers)[1]


def convert_with_report(
    model: torch.nn.Module, mode: str, layers: str = "*"
) -> tuple[AtomisticModel, ConversionReport]:
    """Both :func:`convert` and :func:`conversion_report`, with one conversion."""
    check_mode(mode)
    if not isinstance(model, torch.nn.Module) or not is_atomistic_model(model):
        raise TypeError(
            f"expected a metatomic AtomisticModel, got {type(model).__name__}; a metatrain model "
            "becomes one by its method export()"
        )
    scripted = model
    if not isinstance(model, torch.jit.ScriptModule):
        scripted = torch.jit.script(model).eval()
    content, report = convert_script_module(scripted, mode, layers)
    report.expect_any()
    return _model_of(load_script_module(content)), report


def convert_script_module(
    module: torch.jit.ScriptModule, mode: str, layers: str = "*"
) -> tuple[torch.Tensor, ConversionReport]:
    """
    Rewrite the linear layers of any TorchScript module.

    :return: the bytes of the new TorchScript file as a uint8 tensor, and the report
    """
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return _converted(_tensor_of(buffer.getvalue()), mode, layers)


def load_script_module(content: torch.Tensor) -> torch.jit.ScriptModule:
    """The TorchScript module in the bytes of a file (uint8, on the CPU)."""
    return torch.jit.load(io.BytesIO(content.numpy().data))


@contextlib.contextmanager
def _reading(path: str | Path, extensions_directory: str | Path | None) -> Iterator[None]:
    """Check a file and load its extensions; what fails in the block is an error about the file."""
    model_files.expect_exported_model(path)
    model_files.expect_extensions_directory(extensions_directory)
    directory = None if extensions_directory is None else str(extensions_directory)
    try:
        load_model_extensions(str(path), directory)
        check_atomistic_model(str(path))
        yield
    except RuntimeError as error:
        raise RuntimeError(model_files.reading_failed(path, error)) from error


def _converted(
    content: torch.Tensor, mode: str, layers: str
) -> tuple[torch.Tensor, ConversionReport]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content, text = torch.ops.metatomic_tc.convert(content, mode, layers, device)
    report = json.loads(text)
    found = [LinearLayer(**layer) for layer in report["layers"]]
    attention = [AttentionLayer(**layer) for layer in report["attention"]]
    return content, ConversionReport(
        report["mode"], found, attention, report["fused"], report["problem"]
    )


def _tensor_of(content: bytes) -> torch.Tensor:
    # A bytearray, since PyTorch warns about memory that cannot be written to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _model_of(module: torch.jit.ScriptModule) -> AtomisticModel:
    return AtomisticModel(module, module.metadata(), module.capabilities())
