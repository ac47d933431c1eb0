"""
Runs metatomic models, above all PET, on Tensor Cores with FP32-level accuracy.

Importing this package loads the operator library, so that ``torch.ops.metatomic_tc`` and exported
models that use it work afterwards. A *mode* says how the FP32 operands of a linear layer are
multiplied, e.g. ``tf32x3``; :func:`supported_modes` lists them, and docs/modes.md explains them.
Inputs and outputs are FP32 in every mode.
"""

from . import _library

_library.load()

from ._library import version as __version__  # noqa: E402
from .layers import TCLinear, linear, linear_activation  # noqa: E402
from .models import ConversionReport, conversion_report, convert, load  # noqa: E402
from .modes import supported_modes  # noqa: E402

__all__ = [
    "ConversionReport",
    "TCLinear",
    "__version__",
    "conversion_report",
    "convert",
    "linear",
    "linear_activation",
    "load",
    "supported_modes",
]
