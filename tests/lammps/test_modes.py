"""What the modes of the pair style do to energies and forces, and what it says about them."""

import re
import subprocess

import numpy as np
import pytest
import structures
from lammps_runs import BIN, assert_close


def test_tf32x3_is_near_fp32_and_away_from_tf32(run_lammps, demo_model):
    atoms = structures.water()
    runs = {mode: run_lammps(atoms, demo_model, mode) for mode in ["fp32", "tf32x3", "tf32"]}

    def difference(mode):
        return np.abs(runs[mode].forces - runs["fp32"].forces).max()

    assert_close(runs["tf32x3"], runs["fp32"])
    assert difference("tf32x3") > 0.0
    assert difference("tf32") > 30 * difference("tf32x3")
    assert difference("tf32") > 1e-4

    for mode in ["tf32", "tf32x3"]:
        assert f"mode {mode} (emulated on the CPU)" in runs[mode].log
    assert "tf32 does not have FP32 accuracy" in runs["tf32"].log
    assert "does not have FP32 accuracy" not in runs["tf32x3"].log


def test_bf16x9_is_near_fp32(run_lammps, tiny_pet):
    atoms = structures.water()
    found = run_lammps(atoms, tiny_pet, "bf16x9", ranks=2)
    assert_close(found, run_lammps(atoms, tiny_pet, "fp32"))
    assert found.log.count("mode bf16x9 (emulated on the CPU)") == 1


def test_start_line_says_what_runs(run_lammps, tiny_pet):
    log = run_lammps(structures.water(), tiny_pet, "tf32x3").log
    lines = [line for line in log.splitlines() if line.startswith("metatomic-tc: ")]
    assert len(lines) == 1
    match = re.fullmatch(
        rf"metatomic-tc: model {tiny_pet}.*, float32, on cpu, mode tf32x3 \(emulated on the CPU\), "
        r"(\d+) linear layers replaced and (\d+) left in FP32; "
        r"kernels for many rows: cpu-emulated; "
        r"metatomic-tc [\d.]+, torch 2\.\S+, LAMMPS 22 Jul 2025",
        lines[0],
    )
    assert match, lines[0]
    assert int(match[1]) > 10 and int(match[2]) > 0


def test_an_exported_model_runs_in_the_mode_of_the_pair_style(
    run_lammps, tiny_pet, tiny_pet_checkpoint, tmp_path
):
    exported = tmp_path / "exported.pt"
    command = [
        BIN / "metatomic-tc",
        "export",
        tiny_pet_checkpoint,
        "-o",
        exported,
        "--mode",
        "tf32",
    ]
    subprocess.run(command, check=True)
    atoms = structures.water()
    found = run_lammps(atoms, exported, "fp32")
    assert ", mode fp32, " in found.log
    assert_close(found, run_lammps(atoms, tiny_pet, "fp32"), energy=1e-7, force=1e-6)


def test_a_model_that_is_not_pet_is_converted(run_lammps, pair_model):
    atoms = structures.water()
    model = pair_model()
    fp32, tf32 = (run_lammps(atoms, model, mode) for mode in ["fp32", "tf32"])
    assert "1 linear layers replaced and 1 left in FP32" in tf32.log
    assert np.abs(tf32.forces - fp32.forces).max() > 1e-6
    assert_close(run_lammps(atoms, model, "tf32x3"), fp32)


def test_two_modes_in_one_process(run_lammps, demo_model):
    """The sum of two pair styles is the sum of two runs: a mode is the model's, not global."""
    atoms = structures.water()
    single = {mode: run_lammps(atoms, demo_model, mode) for mode in ["fp32", "tf32"]}
    assert np.abs(single["tf32"].forces - single["fp32"].forces).max() > 1e-4
    both = run_lammps(
        atoms,
        demo_model,
        pair=f"""
pair_style hybrid/overlay metatomic-tc fp32 device cpu metatomic-tc tf32 device cpu
pair_coeff * * metatomic-tc 1 {demo_model} H O
pair_coeff * * metatomic-tc 2 {demo_model} H O
""",
    )
    assert both.log.count("metatomic-tc: model") == 2
    total = single["fp32"].forces + single["tf32"].forces
    assert np.abs(both.forces - total).max() < 1e-5
    assert both.energy == pytest.approx(single["fp32"].energy + single["tf32"].energy, abs=1e-4)
