"""``metatomic-tc export``: a model file for any metatomic engine, in a given mode."""

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metatomic.torch import AtomisticModel

from . import checkpoints, model_files
from ._elements import symbol
from .model_files import Kind, ModelFileError
from .models import ConversionReport, convert_with_report, read_exported
from .modes import DEFAULT_MODE, check_mode
from .pet import backend_of
from .pet.recover import replace_exported_backend
from .pet.replace import used_backend
from .progress import Steps


@dataclass(frozen=True)
class ExportResult:
    """What :func:`export` wrote."""

    path: Path
    #: file size in bytes
    size: int
    report: ConversionReport
    #: the atomic types that the model knows: usually atomic numbers
    atomic_types: list[int]
    extensions: Path | None
    #: of a PET: ``tc``, or ``stock`` with the reason; None for other models
    backend: str | None = None
    #: which linear layers were to use the mode
    layers: str = "*"


def export(
    source: str | Path,
    output: str | Path | None = None,
    mode: str = DEFAULT_MODE,
    extensions: str | Path | None = None,
    outputs: list[str] | None = None,
    version: str | None = None,
    backend: str | None = None,
    layers: str = "*",
) -> ExportResult:
    """
    Write a metatomic model whose linear layers use ``mode``. Prints its steps on stderr.

    :param source: a metatrain checkpoint, an exported metatomic model, or the name of a upet model
        such as ``pet-mad-s`` or ``pet-mad-s@1.6.0``
    :param output: file to write, by default named after ``source``, in the current directory
    :param mode: how its layers multiply, see docs/modes.md
    :param extensions: directory to collect the operator library in, for engines in whose
        environment metatomic-tc is not installed
    :param outputs: the outputs to keep, None for all; see :func:`checkpoints.read_checkpoint`
    :param version: version of a upet model, by default the newest
    :param backend: ``tc``, ``stock`` or None; see :func:`checkpoints.read_checkpoint`
    :param layers: which linear layers use the mode; see :func:`models.load`
    :raises ModelFileError: if ``source`` is none of these, or files would be lost
    :raises ValueError: if there is no such mode, an output does not exist or cannot be dropped,
        the model cannot have the backend, or no layer that could use the mode is chosen
    :raises RuntimeError: if reading or downloading fails
    """
    check_mode(mode)
    named = None
    if not os.path.exists(source):
        named = checkpoints.UPET_NAME.fullmatch(str(source))
        if named is None:
            raise ModelFileError(
                f"there is no file '{source}', and it is not the name of a upet model either "
                "(such as pet-mad-s or pet-mad-s@1.6.0)."
            )
        version = _one_version(named, version)
    elif version is not None:
        raise ModelFileError(
            f"--version is for names of upet models, and '{source}' is a file; leave it out."
        )

    destination = _destination(source, named, output, mode)
    if extensions is not None:
        extensions = Path(extensions)
        _check_extensions_directory(extensions, destination)

    steps = Steps(4 if named else 3)
    name = None
    if named:
        model_name = f"{named['model']}-{named['size']}"
        with steps(f"Getting {model_name} {version or '(newest version)'} from huggingface.co"):
            source, version = checkpoints.download_upet(named["model"], named["size"], version)
        name = f"{model_name} v{version}"
        if output is None:
            destination = Path(f"{model_name}-v{version}.pt")

    source = Path(source)
    file = model_files.expect_checkpoint_or_exported_model(source)
    if outputs is not None and file.kind is Kind.metatomic_model:
        raise ModelFileError(
            f"--outputs needs the checkpoint: outputs cannot be dropped from '{source}', which is "
            "an exported model already. Run: metatomic-tc export MODEL.ckpt --outputs "
            f"{','.join(outputs)}"
        )
    check = file.kind is Kind.metatomic_model and backend != "stock"
    with steps(f"Reading {source.name}{', and comparing the backends of PET' if check else ''}"):
        if file.kind is Kind.metatrain_checkpoint:
            model, used = checkpoints.read_checkpoint(source, outputs, name, backend)
        else:
            model, used = _read_exported(source, backend)
    with steps(f"Converting its linear layers to {mode}"):
        converted, report = convert_with_report(model, mode, layers)
    with steps(f"Writing {destination}"):
        _save(converted, destination, extensions)

    return ExportResult(
        path=destination,
        size=destination.stat().st_size,
        report=report,
        atomic_types=list(model.capabilities().atomic_types),
        extensions=extensions,
        backend=used,
        layers=layers,
    )


def _read_exported(path: Path, backend: str | None) -> tuple[AtomisticModel, str | None]:
    """
    Read an exported model, as :func:`checkpoints.read_checkpoint` does a checkpoint.

    :return: the model, and its backend; None if it is not PET
    """
    model = read_exported(path)
    used = backend_of(model)
    if used == "tc" and backend == "stock":
        raise ValueError(
            "the model has the backend tc, and that of metatrain cannot be put in its place; "
            "export the checkpoint with --backend stock"
        )
    if used == "stock" and backend == "stock":
        return model, "stock, as asked for"
    if used == "stock":
        model, reason = replace_exported_backend(model)
        used = used_backend(backend, reason)
    elif used is None and backend == "tc":
        used_backend(backend, "it is not PET")
    return model, used


def run(arguments) -> int:
    """The command; ``arguments`` are those of the command line."""
    start = time.monotonic()
    outputs = None
    if arguments.outputs is not None:
        outputs = [name.strip() for name in arguments.outputs.split(",") if name.strip()]
        if not outputs:
            raise ModelFileError("--outputs needs at least one name, e.g. --outputs energy")
    result = export(
        arguments.source,
        arguments.output,
        arguments.mode,
        arguments.extensions,
        outputs,
        arguments.model_version,
        arguments.backend,
        arguments.layers,
    )
    print(f"Done in {time.monotonic() - start:.1f} s.", file=sys.stderr)
    print(summary(result))
    return 0


def summary(result: ExportResult) -> str:
    """What was written, and how to use it."""
    report = result.report
    file = shlex.quote(str(result.path))
    symbols = [symbol(atomic_type) for atomic_type in result.atomic_types]
    elements = " ".join(symbols) if len(symbols) <= 6 else "ELEMENT ELEMENT ..."
    reason = "too small to gain" if result.layers == "*" else "too small to gain or not chosen"
    left = f"{report.left} {reason} stay in FP32" if report.left else "none stays in FP32"
    lines = [
        f"{result.path}: {result.size / 1e6:.1f} MB, mode {report.mode}",
        f"  linear layers: {report.replaced} compute in {report.mode}, {left}",
        *([] if result.backend is None else [f"  backend: {result.backend}"]),
        f"  elements: {' '.join(symbols)}",
        "",
        "In LAMMPS (one element for each of your atom types, in their order):",
        f"  pair_style  metatomic-tc {report.mode}",
        f"  pair_coeff  * * {file} {elements}",
        "In ASE, and likewise in other metatomic engines:",
    ]
    if result.extensions is None:
        lines += [
            "  import metatomic_tc  # brings the operators that the model calls",
            f"  calculator = metatomic_ase.MetatomicCalculator({str(result.path)!r})",
        ]
    else:
        lines += [
            f"  calculator = metatomic_ase.MetatomicCalculator(\n      {str(result.path)!r}, "
            f"extensions_directory={str(result.extensions)!r}\n  )",
        ]
    return "\n".join(lines)


def _one_version(named, version: str | None) -> str | None:
    if version is not None:
        version = version.removeprefix("v")
    if version is not None and named["version"] is not None and version != named["version"]:
        raise ModelFileError(
            f"two versions are given: {named['version']} in the name and {version} by --version."
        )
    return version or named["version"]


def _destination(source: str | Path, named, output: str | Path | None, mode: str) -> Path:
    if output is not None:
        destination = Path(output)
    elif named:
        destination = Path(f"{named['model']}-{named['size']}.pt")
    elif Path(source).suffix == ".pt":
        destination = Path(f"{Path(source).stem}-{mode}.pt")
    else:
        destination = Path(f"{Path(source).stem}.pt")

    if destination.suffix == ".ckpt":
        raise ModelFileError(
            f"the output '{destination}' is named like a checkpoint, but will be an exported "
            f"model; name it {destination.with_suffix('.pt').name}"
        )
    if destination.suffix != ".pt" and not destination.is_dir():
        raise ModelFileError(
            f"the output '{destination}' does not end in .pt, by which engines know exported "
            f"models; name it {destination.name}.pt"
        )
    if destination.is_dir():
        raise ModelFileError(
            f"the output '{destination}' is a directory; give a file name in it, e.g. "
            f"{destination / 'model.pt'}"
        )
    if not destination.absolute().parent.is_dir():
        raise ModelFileError(
            f"the directory of the output '{destination}' does not exist; run: "
            f"mkdir -p {shlex.quote(str(destination.parent))}"
        )
    if destination.exists() and os.path.exists(source) and destination.samefile(source):
        raise ModelFileError(f"the output '{destination}' is the input; give another name with -o.")
    return destination


def _save(model: AtomisticModel, destination: Path, extensions: Path | None) -> None:
    with tempfile.TemporaryDirectory(
        dir=destination.absolute().parent, prefix=".metatomic-tc-"
    ) as directory:
        # The name in the temporary directory is the final one, since it is written into the file.
        temporary = Path(directory) / destination.name
        with warnings.catch_warnings(), _kept_aside(extensions):
            warnings.simplefilter("ignore")
            collect = None if extensions is None else str(extensions)
            model.save(temporary, collect_extensions=collect)
            os.replace(temporary, destination)


def _check_extensions_directory(extensions: Path, destination: Path) -> None:
    """Metatomic empties the directory, so it must hold nothing but libraries collected before."""
    if extensions.absolute() == destination.absolute():
        raise ModelFileError(
            f"--extensions '{extensions}' is the output; give a directory of another name."
        )
    if not extensions.exists():
        return
    if not extensions.is_dir():
        raise ModelFileError(f"--extensions '{extensions}' is a file; give a directory.")
    for path in extensions.rglob("*"):
        if path.is_file() and ".so" not in path.suffixes and path.suffix not in (".dylib", ".dll"):
            raise ModelFileError(
                f"--extensions '{extensions}' is a directory with other files, such as "
                f"'{path.relative_to(extensions)}', which would be deleted; give a new directory."
            )


@contextlib.contextmanager
def _kept_aside(directory: Path | None) -> Iterator[None]:
    """Move a directory away; put it back if the block fails, delete it otherwise."""
    if directory is None or not directory.is_dir():
        yield
        return
    aside = Path(tempfile.mkdtemp(dir=directory.absolute().parent, prefix=".metatomic-tc-"))
    try:
        os.replace(directory, aside / "kept")
        try:
            yield
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(aside / "kept", directory)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
