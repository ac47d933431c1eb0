"""Loads the operator library, ``libmetatomic_tc.so``."""

import os
import sys

try:
    from ._build_info import TORCH_VERSION as torch_version
    from ._build_info import VERSION as version
except ModuleNotFoundError:
    raise ImportError(
        f"metatomic_tc was imported from '{os.path.dirname(__file__)}', which holds its Python "
        "files but no compiled library; install it with `pip install .` in the metatomic-tc "
        "repository, and start Python in another directory."
    ) from None

import torch

LIBRARY_NAME = "libmetatomic_tc.so"


def load() -> None:
    """
    Load the operator library into this process, once.

    :raises ImportError: if the library was built for another PyTorch, or is not there
    """
    found = minor_version(torch.__version__)
    if found != torch_version:
        raise ImportError(
            f"metatomic-tc {version} was built for PyTorch {torch_version}, but PyTorch "
            f"{torch.__version__} is installed; {reinstall_advice()}"
        )

    # A model's extensions may have brought the library into the process already, from a copy in an
    # extensions directory, and operators can be registered only once.
    if hasattr(torch.ops.metatomic_tc, "linear"):
        return

    import metatomic.torch  # noqa: F401, models need its classes, whatever is imported later

    path = find("lib", LIBRARY_NAME)
    if path is None:
        raise ImportError(
            f"the operator library '{LIBRARY_NAME}' is missing from "
            f"'{os.path.dirname(__file__)}'; {reinstall_advice()}"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"the operator library '{path}' cannot be loaded ({error}); {reinstall_advice()}"
        ) from error


def find(*parts: str) -> str | None:
    """The path of an installed file of this package, or None if it is not there."""
    # An editable installation has more than one directory.
    for directory in sys.modules[__package__].__path__:
        path = os.path.join(directory, *parts)
        if os.path.isfile(path):
            return path
    return None


def minor_version(full: str) -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(full.split("+")[0].split(".")[:2])


def reinstall_advice() -> str:
    return (
        "build it again for the PyTorch that is installed, with `pip install --force-reinstall "
        "--no-deps --no-cache-dir metatomic-tc` (or the path of the metatomic-tc repository "
        "instead of the name)."
    )
