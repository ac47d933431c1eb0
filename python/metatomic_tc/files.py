"""Writing files."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file at once: who reads it finds the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)
