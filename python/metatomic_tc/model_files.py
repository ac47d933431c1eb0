"""Tells the files that users have apart, without running anything that is in them."""

import enum
import pickletools
import re
import shlex
import zipfile
from dataclasses import dataclass, field
from pathlib import Path


class ModelFileError(ValueError):
    """A file is not what was expected. The message says what it is, and what to do."""


class Kind(enum.Enum):
    """What a file is, in words that fit into "this is …"."""

    metatomic_model = "an exported metatomic model"
    metatrain_checkpoint = "a metatrain checkpoint"
    old_metatensor_model = (
        "a model exported by metatensor-torch, from before metatomic existed (2025)"
    )
    torchscript = "a TorchScript file, but not a metatomic model"
    torch_save = "a file written by torch.save, but not a metatrain checkpoint"
    zip_file = "a zip archive without a model"
    damaged_zip = "a damaged or incomplete zip archive"
    git_lfs_pointer = "a Git LFS pointer: the text that stands for a file that was not downloaded"
    web_page = "a web page, not the file it links to"
    empty = "an empty file"
    other = "not a model file (neither TorchScript nor a checkpoint)"


@dataclass(frozen=True)
class CheckpointHeader:
    """One model of a checkpoint; a wrapper such as LLPR comes before the model that it wraps."""

    #: e.g. "pet" or "llpr"
    architecture: str
    #: version of the checkpoint format of this architecture, None in very old files
    version: int | None


@dataclass(frozen=True)
class ModelFile:
    """A file, and what is in it."""

    path: Path
    kind: Kind
    #: for metatrain checkpoints
    headers: list[CheckpointHeader] = field(default_factory=list)


def identify(path: str | Path) -> ModelFile:
    """
    Find out what a file is.

    :raises ModelFileError: if there is no such file, or if it is a directory
    :raises PermissionError: if the file cannot be read
    """
    path = Path(path)
    if path.is_dir():
        raise ModelFileError(f"'{path}' is a directory, but a model file was expected.")
    if not path.exists():
        raise ModelFileError(f"there is no file '{path}'.")

    with path.open("rb") as file:
        start = file.read(512)
    if not start.startswith(b"PK"):
        return ModelFile(path, _kind_of_plain_file(path, start))

    try:
        with zipfile.ZipFile(path) as archive:
            if all(entry.header_offset != 0 for entry in archive.infolist()):
                # The end is missing, and this is the end of an archive inside of the archive.
                return ModelFile(path, Kind.damaged_zip)
            # PyTorch does not compare checksums when it reads from Python: damaged weights would
            # go unnoticed.
            if archive.testzip() is not None:
                return ModelFile(path, Kind.damaged_zip)
            # TorchScript and torch.save put everything into one folder of any name.
            names = {name.partition("/")[2] for name in archive.namelist()}
            if "constants.pkl" in names:
                if "extra/metatomic-version" in names:
                    kind = Kind.metatomic_model
                elif "extra/metatensor-version" in names:
                    kind = Kind.old_metatensor_model
                else:
                    kind = Kind.torchscript
                return ModelFile(path, kind)
            if "data.pkl" in names:
                pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                headers = _checkpoint_headers(archive.read(pickled))
                kind = Kind.metatrain_checkpoint if headers else Kind.torch_save
                return ModelFile(path, kind, headers)
            return ModelFile(path, Kind.zip_file)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError):
        return ModelFile(path, Kind.damaged_zip)


def expect_exported_model(path: str | Path) -> None:
    """
    Check that a file is an exported metatomic model.

    :raises ModelFileError: if it is anything else
    """
    file = identify(path)
    if file.kind is Kind.metatomic_model:
        return
    raise ModelFileError(
        f"'{file.path}' is {file.kind.value}; expected an exported metatomic model (.pt). "
        f"{_advice(file)}"
    )


def expect_extensions_directory(directory: str | Path | None) -> None:
    """
    Check that a directory of TorchScript extensions is there; None is fine.

    :raises ModelFileError: if it is not
    """
    if directory is not None and not Path(directory).is_dir():
        raise ModelFileError(
            f"the extensions directory '{directory}' is not a directory; give the one that was "
            "collected with the model, or none."
        )


def expect_checkpoint_or_exported_model(path: str | Path) -> ModelFile:
    """
    Check that a file is a metatrain checkpoint that the installed metatrain can read, or an
    exported metatomic model.

    :raises ModelFileError: if it is anything else, or if metatrain is missing or too old
    """
    file = identify(path)
    if file.kind is Kind.metatrain_checkpoint:
        _expect_readable(file)
    elif file.kind is not Kind.metatomic_model:
        raise ModelFileError(
            f"'{file.path}' is {file.kind.value}; expected a metatrain checkpoint (.ckpt) or an "
            f"exported metatomic model (.pt). {_advice(file)}"
        )
    return file


def used_modes(path: str | Path) -> list[str]:
    """
    The modes that the linear layers of an exported model use, read from its TorchScript code: none
    in a plain `mtt export` file, usually one in a file of `metatomic-tc export`.
    """
    call = re.compile(
        r'\bmetatomic_tc\.linear(?:_activation)?\([^"\n]*(?:"(?:silu|swiglu)", )?"([^"\n]*)"\)'
    )
    modes: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if "/code/" in name and name.endswith(".py"):
                code = archive.read(name).decode()
                modes.update(call.findall(code))
    return sorted(modes)


def reading_failed(path: str | Path, error: Exception) -> str:
    """The message for a file that looked right, but could not be read."""
    text = str(error)
    if "Unknown builtin op" in text or "__torch__.torch.classes." in text:
        return (
            f"the model '{path}' needs a TorchScript extension that is not there; install the "
            "package that it comes from, or give the directory that was collected with the model "
            f"(extensions_directory in Python). PyTorch says: {first_line(text)}"
        )
    return (
        f"'{path}' looks like a model, but cannot be read: it may be damaged, or written by a "
        f"newer PyTorch; get the file again. PyTorch says: {first_line(text)}"
    )


def first_line(text: str) -> str:
    """The first line of an error that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _kind_of_plain_file(path: Path, start: bytes) -> Kind:
    if not start:
        return Kind.empty
    if start.startswith(b"version https://git-lfs"):
        return Kind.git_lfs_pointer
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return Kind.web_page
    # The format of torch.save before PyTorch 1.6: a pickled magic number comes first.
    if start.startswith(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."):
        return Kind.torch_save
    return Kind.other


def _advice(file: ModelFile) -> str:
    name = shlex.quote(str(file.path))
    if file.kind is Kind.metatrain_checkpoint:
        return f"Export it: metatomic-tc export {name}"
    if file.kind is Kind.old_metatensor_model:
        return (
            "Metatomic cannot read it. Export the checkpoint that it was made from again: "
            "metatomic-tc export MODEL.ckpt"
        )
    if file.kind is Kind.torchscript:
        return (
            "Wrap the module in metatomic.torch.AtomisticModel and save that, or, for a metatrain "
            "model, start from its checkpoint: metatomic-tc export MODEL.ckpt"
        )
    if file.kind is Kind.torch_save:
        return (
            "If it holds only the weights, find the checkpoint that `mtt train` wrote: "
            "metatomic-tc export MODEL.ckpt"
        )
    if file.kind is Kind.zip_file:
        return f"See what is in it, and unpack it if a model is: unzip -l {name}"
    if file.kind is Kind.git_lfs_pointer:
        return f"Get the file itself: git lfs pull --include {name}"
    if file.kind in (Kind.damaged_zip, Kind.empty, Kind.web_page):
        return "Download or copy the file again, and compare its size with the original's."
    return "Run `metatomic-tc export MODEL.ckpt` on the checkpoint that `mtt train` wrote."


def _expect_readable(file: ModelFile) -> None:
    """Check that the installed metatrain knows the architecture and version of a checkpoint."""
    from .pet.replace import METATRAIN_VERSIONS

    install = f"pip install metatrain=={METATRAIN_VERSIONS[-1]}"
    try:
        import metatrain
        from metatrain.utils.architectures import find_all_architectures, import_architecture
    except ImportError as error:
        raise ModelFileError(
            f"'{file.path}' is a metatrain checkpoint, and reading it needs metatrain "
            f"({error}); run: {install}"
        ) from error

    upgrade = (
        f"run: {install}; if that is installed, a newer one may read it "
        "(pip install --upgrade metatrain), but PET then keeps metatrain's backend"
    )
    for header in file.headers:
        if header.architecture not in find_all_architectures():
            raise ModelFileError(
                f"'{file.path}' is a checkpoint of the architecture '{header.architecture}', which "
                f"the installed metatrain {metatrain.__version__} does not know; {upgrade}"
            )
        try:
            newest = import_architecture(header.architecture).__model__.__checkpoint_version__
        except ImportError as error:
            raise ModelFileError(
                f"'{file.path}' is a checkpoint of the architecture '{header.architecture}', which "
                f"needs a package that is not installed: {error}"
            ) from error
        if header.version is not None and header.version > newest:
            raise ModelFileError(
                f"'{file.path}' is newer than the installed metatrain {metatrain.__version__}: its "
                f"'{header.architecture}' checkpoint has version {header.version}, and this "
                f"metatrain reads versions up to {newest}; {upgrade}"
            )


def _checkpoint_headers(pickled: bytes) -> list[CheckpointHeader]:
    """
    The architectures and versions in a checkpoint, from its pickle opcodes alone: nothing is
    unpickled, so that files of unknown origin and classes of a newer metatrain do no harm.
    """
    atoms = _strings_and_numbers(pickled)
    headers: list[CheckpointHeader] = []
    for key, value in zip(atoms, atoms[1:], strict=False):
        if key == "architecture_name" and isinstance(value, str):
            headers.append(CheckpointHeader(value, None))
        elif key == "model_ckpt_version" and isinstance(value, int) and headers:
            headers[-1] = CheckpointHeader(headers[-1].architecture, value)
    return headers


def _strings_and_numbers(pickled: bytes) -> list[str | int]:
    atoms: list[str | int] = []
    memo: dict[int, str] = {}
    last: str | None = None
    memoized = 0
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if "UNICODE" in name:
                last = argument
                atoms.append(argument)
                continue
            if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                index = memoized if argument is None else argument
                memoized += 1
                if last is not None:
                    memo[index] = last
            elif name in ("BINGET", "LONG_BINGET") and argument in memo:
                atoms.append(memo[argument])
            elif name.startswith("BININT"):
                atoms.append(argument)
            last = None
    except ValueError:
        pass  # not a pickle; what was found so far counts
    return atoms
