"""Writing files."""

import datetime
import os
import re
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file at once: who reads it finds the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    os.replace(temporary, path)


def result_path(benchmark: str, gpu: str | None, output: str | Path) -> Path:
    """
    The file for the results of a benchmark: ``output`` if that is a .json file, else one in that
    directory, named after the benchmark, the GPU (or the CPU) and the date. Its directory is made.
    """
    path = Path(output)
    if path.suffix != ".json":
        name = re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower()).removeprefix("nvidia-")
        path = path / f"{benchmark}-{name}-{datetime.date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
