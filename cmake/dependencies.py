"""The wheel's dependencies: the PyTorch it was built against, and nothing newer or older.

A metadata provider of scikit-build-core. It runs in pip's isolated environment, so the version of
PyTorch is read by the environment's own interpreter (`-I` undoes the isolation).
"""

import subprocess
import sys

RUNTIME = ["metatensor-torch==0.10.8", "metatomic-torch==0.1.19", "numpy"]


def dynamic_metadata(field: str, settings: dict | None = None) -> list[str]:
    """The value of `dependencies`; torch is pinned to the minor version found."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    if found.returncode != 0:
        raise RuntimeError(
            "No PyTorch was found in this Python environment, but metatomic-tc is built against "
            "the PyTorch it will run with; install it first: pip install torch"
        )
    major, minor = found.stdout.split(".")[:2]
    return [f"torch=={major}.{minor}.*", *RUNTIME]
