"""Wrong files are told apart, each with what was found, what was expected, and what to run."""

import io
import json
import pickle
import sys
import zipfile

import metatomic_tc
import pytest
import torch
from metatomic_tc.cli import main
from metatomic_tc.model_files import CheckpointHeader, Kind, ModelFileError, identify
from metatomic_tc.pet.replace import METATRAIN_VERSIONS

pytestmark = pytest.mark.filterwarnings("ignore")


def rewritten(source, target, extra: dict[str, bytes], without: str):
    """Copy a zip archive, leaving out files with `without` in their name and adding `extra`."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if without not in name:
                new.writestr(name, old.read(name))
        for name, content in extra.items():
            new.writestr(name, content)
    return target


def with_damaged_weights(source) -> bytes:
    """A file with one bit flipped in the middle of its largest record; only its checksum knows."""
    content = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content[largest.header_offset + largest.file_size // 2] ^= 0x40
    return bytes(content)


@pytest.fixture
def wrong_file(request, tmp_path, tiny_pet, tiny_pet_checkpoint):
    """A file of the kind in `request.param`."""
    path = tmp_path / "model.pt"
    kind = request.param
    if kind == "old metatensor model":
        extra = {"tiny/extra/metatensor-version": b"0.6.0"}
        return rewritten(tiny_pet, path, extra, "extra/metatomic-version")
    if kind == "torchscript":
        torch.jit.script(torch.nn.Linear(3, 3)).save(path)
    elif kind == "state dictionary":
        torch.save(torch.nn.Linear(3, 3).state_dict(), path)
    elif kind == "old torch.save":
        torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    elif kind == "random zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("holiday/photo.jpg", b"...")
    elif kind == "truncated":
        path.write_bytes(tiny_pet.read_bytes()[:20000])
    elif kind == "damaged weights":
        path.write_bytes(with_damaged_weights(tiny_pet))
    elif kind == "text":
        path.write_text("units metal\n")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "git lfs":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "web page":
        path.write_text("<!DOCTYPE html>\n<html>404</html>\n")
    return path


WRONG_FILES = [
    ("old metatensor model", "before metatomic existed", "metatomic-tc export MODEL.ckpt"),
    ("torchscript", "a TorchScript file, but not a metatomic model", "AtomisticModel"),
    ("state dictionary", "not a metatrain checkpoint", "`mtt train`"),
    ("old torch.save", "not a metatrain checkpoint", "`mtt train`"),
    ("random zip", "zip archive without a model", "unzip -l"),
    ("truncated", "damaged or incomplete", "again"),
    ("damaged weights", "damaged or incomplete", "again"),
    ("text", "not a model file", "metatomic-tc export MODEL.ckpt"),
    ("empty", "an empty file", "again"),
    ("git lfs", "a Git LFS pointer", "git lfs pull"),
    ("web page", "a web page", "again"),
]


@pytest.mark.parametrize("wrong_file, found, advice", WRONG_FILES, indirect=["wrong_file"])
def test_wrong_files(wrong_file, found, advice, tmp_path, capsys):
    for command in (
        ["export", str(wrong_file), "-o", str(tmp_path / "o.pt")],
        ["info", str(wrong_file)],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("metatomic-tc: error: ") and "Traceback" not in error
        assert found in error and advice in error and "expected" in error
        assert str(wrong_file) in error
    with pytest.raises(ModelFileError, match=found):
        metatomic_tc.load(wrong_file)
    assert not (tmp_path / "o.pt").exists()


def test_every_wrong_file_has_its_own_message():
    assert len({(found, advice) for _, found, advice in WRONG_FILES}) >= 9


def test_files_that_are_not_there(tmp_path, capsys):
    assert main(["info", str(tmp_path / "no.pt")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["info", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "no.ckpt")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_checkpoint_where_an_exported_model_belongs(tiny_pet_checkpoint):
    with pytest.raises(ModelFileError, match="metatomic-tc export .*tiny.ckpt"):
        metatomic_tc.load(tiny_pet_checkpoint)


def test_right_files(tiny_pet, tiny_pet_checkpoint, tiny_llpr_checkpoint):
    assert identify(tiny_pet).kind is Kind.metatomic_model
    file = identify(tiny_pet_checkpoint)
    assert file.kind is Kind.metatrain_checkpoint
    assert [header.architecture for header in file.headers] == ["pet"]
    assert all(isinstance(header.version, int) for header in file.headers)
    assert [h.architecture for h in identify(tiny_llpr_checkpoint).headers] == ["llpr", "pet"]


@pytest.mark.parametrize("fixture", ["tiny_pet_checkpoint", "tiny_llpr_checkpoint"])
def test_checkpoints_newer_than_metatrain(fixture, request, tmp_path, capsys):
    checkpoint = torch.load(request.getfixturevalue(fixture), weights_only=False)
    pet = checkpoint.get("wrapped_model_checkpoint", checkpoint)
    pet["model_ckpt_version"] += 5
    path = tmp_path / "new.ckpt"
    torch.save(checkpoint, path)
    assert main(["export", str(path), "-o", str(tmp_path / "new.pt")]) == 2
    error = capsys.readouterr().err
    assert "newer than the installed metatrain" in error
    assert f"version {pet['model_ckpt_version']}" in error
    assert "pip install --upgrade metatrain" in error
    assert f"pip install metatrain=={METATRAIN_VERSIONS[-1]}" in error


def test_checkpoints_of_an_unknown_architecture(tiny_pet_checkpoint, tmp_path, capsys):
    checkpoint = torch.load(tiny_pet_checkpoint, weights_only=False)
    checkpoint["architecture_name"] = "pet2030"
    path = tmp_path / "new.ckpt"
    torch.save(checkpoint, path)
    assert main(["export", str(path), "-o", str(tmp_path / "new.pt")]) == 2
    error = capsys.readouterr().err
    assert "'pet2030'" in error and "pip install --upgrade metatrain" in error


def test_broken_checkpoints_are_an_error_in_a_sentence(tiny_pet_checkpoint, tmp_path, capsys):
    checkpoint = torch.load(tiny_pet_checkpoint, weights_only=False)
    del checkpoint["best_model_state_dict"]["backend.edge_embedder.weight"]
    path = tmp_path / "broken.ckpt"
    torch.save(checkpoint, path)
    assert main(["export", str(path), "-o", str(tmp_path / "new.pt")]) == 1
    error = capsys.readouterr().err
    assert "metatrain cannot read the checkpoint" in error and "Traceback" not in error


def test_checkpoints_without_metatrain(tiny_pet_checkpoint, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "metatrain"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "metatrain", None)
    assert main(["export", str(tiny_pet_checkpoint)]) == 2
    assert f"pip install metatrain=={METATRAIN_VERSIONS[-1]}" in capsys.readouterr().err


class Trap:
    """Does harm when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def test_nothing_is_unpickled_to_identify_a_file(tmp_path):
    path = tmp_path / "trap.ckpt"
    content = {"architecture_name": "pet", "model_ckpt_version": 999, "trap": Trap()}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    assert identify(path).headers == [CheckpointHeader("pet", 999)]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_headers_in_every_pickle_protocol(protocol, tmp_path):
    inner = {"architecture_name": "pet", "model_ckpt_version": 70000}
    content = {
        "architecture_name": "llpr",
        "model_ckpt_version": 4,
        "names": ["architecture_name"],
        "wrapped_model_checkpoint": inner,
    }
    path = tmp_path / "model.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=protocol))
    headers = identify(path).headers
    assert headers[0] == CheckpointHeader("llpr", 4)
    assert headers[-1] == CheckpointHeader("pet", 70000)


def test_models_with_a_missing_extension(tiny_pet, tmp_path, capsys):
    """An operator that nobody provides: the file names an extension that is not there."""
    extensions = [{"name": "exotic", "sha256": "0", "path": "exotic/lib/libexotic.so"}]
    path = tmp_path / "exotic.pt"
    with zipfile.ZipFile(tiny_pet) as archive:
        code = next(n for n in archive.namelist() if n.endswith("metatrain/pet/modules/backend.py"))
        broken = archive.read(code).replace(b"torch.linear(", b"ops.exotic.linear(")
        if broken == archive.read(code):
            names = [n for n in archive.namelist() if "torch/nn/modules/linear" in n]
            code = next(n for n in names if n.endswith(".py"))
            broken = archive.read(code).replace(b"torch.linear(", b"ops.exotic.linear(")
    content = io.BytesIO()
    with zipfile.ZipFile(tiny_pet) as old, zipfile.ZipFile(content, "w") as new:
        for name in old.namelist():
            if name == code:
                new.writestr(name, broken)
            elif name.endswith("extra/extensions"):
                new.writestr(name, json.dumps(extensions))
            else:
                new.writestr(name, old.read(name))
    path.write_bytes(content.getvalue())
    for command in (["info", str(path)], ["export", str(path), "-o", str(tmp_path / "o.pt")]):
        assert main(command) == 1
        assert "needs a TorchScript extension" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="extension"):
        metatomic_tc.load(path)


def test_a_missing_extensions_directory_is_an_error(tiny_pet, tmp_path, capsys):
    missing = tmp_path / "nowhere"
    with pytest.raises(ModelFileError, match="is not a directory"):
        metatomic_tc.load(tiny_pet, extensions_directory=missing)
    assert main(["info", str(tiny_pet), "--extensions", str(missing)]) == 2
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-o", "model.xyz"], "does not end in .pt"),
        (["-o", "model.pt", "--extensions", "model.pt"], "is the output"),
    ],
)
def test_outputs_that_cannot_be(tiny_pet, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(tiny_pet), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
