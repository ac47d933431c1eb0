"""The keywords of `pair_style metatomic-tc`, one by one."""

import re

import numpy as np
import pytest
import structures
from lammps_runs import assert_close
from pair_model import NC_FORCE, NC_STRESS

# ---- scale ---------------------------------------------------------------------------------------


def scaled(result, factor):
    for name in ["energy", "energies", "forces", "virial"]:
        setattr(result, name, factor * getattr(result, name))
    return result


def test_scale_multiplies_everything(run_lammps, tiny_pet):
    atoms = structures.water()
    found = run_lammps(atoms, tiny_pet, ranks=2, options="device cpu scale -0.25")
    assert_close(found, scaled(run_lammps(atoms, tiny_pet), -0.25))


def test_fix_adapt_changes_scale(run_lammps, tiny_pet):
    atoms = structures.water()
    commands = """
variable factor equal 1-0.25*step
fix 1 all adapt 1 pair metatomic-tc scale * * v_factor
timestep 0
fix 2 all nve
run 2
"""
    found = run_lammps(atoms, tiny_pet, commands=commands)
    once = run_lammps(atoms, tiny_pet)
    assert found.thermo[:, 1] == pytest.approx(once.energy * np.array([1.0, 0.75, 0.5]), rel=1e-6)
    assert_close(found, scaled(once, 0.5))


def test_hybrid_scaled(run_lammps, tiny_pet):
    """Two factors, a variable one of LAMMPS and the keyword, multiply."""
    atoms = structures.water()
    pair = f"""
variable half equal 0.5
pair_style hybrid/scaled v_half metatomic-tc fp32 device cpu scale 3.0 1.0 zero 4.0
pair_coeff * * metatomic-tc {tiny_pet} H O
pair_coeff * * zero
"""
    assert_close(run_lammps(atoms, tiny_pet, pair=pair), scaled(run_lammps(atoms, tiny_pet), 1.5))


# ---- variants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, factor",
    [
        ("variant/energy double", 2.0),
        ("variant double", 2.0),
        ("variant off", 1.0),
        ("variant double variant/energy off", 1.0),
    ],
)
def test_variant_of_the_energy(run_lammps, pair_model, options, factor):
    atoms, model = structures.water(), pair_model(extras=True)
    options = f"device cpu uncertainty_threshold off {options}"
    found = run_lammps(atoms, model, options=options)
    assert_close(found, scaled(run_lammps(atoms, model), factor))


def test_unknown_variant_names_those_there_are(run_lammps, pair_model):
    model = pair_model(extras=True)
    error = run_lammps(structures.water(), model, options="variant/energy triple").error
    assert f"{model} has no such energy" in error and "triple" in error and "double" in error


# ---- layers --------------------------------------------------------------------------------------


def layer_counts(log):
    match = re.search(r"(\d+) linear layers replaced and (\d+) left in FP32", log)
    return int(match[1]), int(match[2])


def test_layers_chooses_what_the_mode_applies_to(run_lammps, demo_model):
    atoms = structures.water()
    runs = {"fp32": run_lammps(atoms, demo_model), "*": run_lammps(atoms, demo_model, "tf32")}
    for pattern in ["*gnn_layers.0.*", "!*gnn_layers.0.*"]:
        options = f"device cpu layers {pattern}"
        runs[pattern] = run_lammps(atoms, demo_model, "tf32", options=options)
        assert runs[pattern].code == 0, runs[pattern].log
    counts = {pattern: layer_counts(run.log) for pattern, run in runs.items()}
    some, others = "*gnn_layers.0.*", "!*gnn_layers.0.*"
    assert counts[some][0] + counts[others][0] == counts["*"][0]
    assert 0 < counts[some][0] < counts["*"][0]
    assert len({sum(count) for count in counts.values()}) == 1

    def difference(a, b):
        return np.abs(runs[a].forces - runs[b].forces).max()

    # Both parts really are TF32, neither is all of it.
    for pattern in [some, others]:
        assert difference(pattern, "fp32") > 1e-4
        assert difference(pattern, "*") > 1e-5


def test_layers_in_a_mode_of_fp32_accuracy(run_lammps, demo_model):
    atoms = structures.water()
    options = "device cpu layers *mlp*"
    found = run_lammps(atoms, demo_model, "tf32x3", ranks=2, options=options)
    assert_close(found, run_lammps(atoms, demo_model))


def test_layers_that_match_nothing(run_lammps, tiny_pet):
    options = "device cpu layers *gnnlayers*"
    error = run_lammps(structures.water(), tiny_pet, "tf32x3", options=options).error
    assert re.search(r"layers '\*gnnlayers\*' chooses none of the \d+ linear layers", error)
    assert "gnn_layers" in error


# ---- non-conservative outputs --------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("choice", ["on", "forces", "stress", "off"])
def test_non_conservative(run_lammps, pair_model, choice, ranks):
    atoms, model = structures.water(), pair_model(extras=True)
    expected = run_lammps(atoms, model)
    if choice in ("on", "forces"):
        expected.forces = np.tile(NC_FORCE, (len(atoms), 1))
    if choice in ("on", "stress"):
        expected.virial = np.array([*NC_STRESS, 0, 0, 0]) * -len(atoms) * atoms.get_volume()
    options = f"device cpu non_conservative {choice}"
    assert_close(run_lammps(atoms, model, ranks=ranks, options=options), expected)


def test_non_conservative_in_real_units(run_lammps, pair_model):
    atoms, model = structures.water(), pair_model(extras=True)
    options = "device cpu non_conservative on"
    metal, real = (
        run_lammps(atoms, model, options=options, units=units) for units in ["metal", "real"]
    )
    assert_close(scaled(real, 1 / 23.060547830619026), metal)


def test_non_conservative_forces_of_pet(run_lammps, tiny_two_heads):
    """One rank and two agree, and there is a virial that is a derivative."""
    path = tiny_two_heads
    atoms = structures.water()
    one, two = (
        run_lammps(atoms, path, ranks=ranks, options="device cpu non_conservative forces")
        for ranks in [1, 2]
    )
    assert_close(two, one)
    conservative = run_lammps(atoms, path)
    assert np.abs(one.forces - conservative.forces).max() > 1e-3
    assert one.virial == pytest.approx(conservative.virial, abs=1e-4)


@pytest.mark.parametrize("choice, missing", [("on", "force"), ("stress", "stress")])
def test_non_conservative_without_such_outputs(run_lammps, tiny_pet, choice, missing):
    options = f"device cpu non_conservative {choice}"
    error = run_lammps(structures.water(), tiny_pet, options=options).error
    assert f"has no such non-conservative {missing}, which the keyword non_conservative" in error


def test_non_conservative_stress_needs_periodicity(run_lammps, pair_model):
    options = "device cpu non_conservative stress"
    model = pair_model(extras=True)
    error = run_lammps(structures.water(), model, options=options, boundary="p p f").error
    assert "needs a box that is periodic in all three directions" in error


# ---- uncertainty ---------------------------------------------------------------------------------


def warnings_of(log):
    return [line for line in log.splitlines() if "the uncertainty of the energy of" in line]


@pytest.mark.parametrize(
    "options, uncertain",
    [
        ("", 8),
        ("uncertainty_threshold 0.005", 24),
        ("uncertainty_threshold 0.3", 0),
        ("uncertainty_threshold off", 0),
    ],
)
def test_uncertainty_threshold(run_lammps, pair_model, options, uncertain):
    commands = "fix 1 all nve\ncompute p all pair metatomic-tc\n"
    commands += "thermo_style custom step pe c_p[1]\nrun 2"
    model = pair_model(extras=True)
    log = run_lammps(
        structures.water(), model, options=f"device cpu {options}", commands=commands
    ).log
    found = warnings_of(log)
    assert len(found) == (3 if uncertain else 0)
    if uncertain:
        assert f"at step 0 the uncertainty of the energy of {uncertain} atoms is above" in found[0]
        assert "atom IDs: 1 4 7 " in found[0] or "atom IDs: 1 2 3 " in found[0]
        assert found[0].rstrip().split(" (")[0].endswith("...") == (uncertain > 10)
    assert re.search(rf"^ +2 +\S+ +{uncertain} *$", log, flags=re.MULTILINE)


def test_uncertainty_in_real_units(run_lammps, pair_model):
    model = pair_model(extras=True)
    log = run_lammps(structures.water(), model, ranks=2, units="real").log
    assert sum(int(re.search(r"of (\d+) atoms", line)[1]) for line in warnings_of(log)) == 8
    assert "above 2.306" in warnings_of(log)[0]


def test_uncertainty_of_a_model_that_has_none(run_lammps, tiny_pet):
    options = "device cpu uncertainty_threshold 0.1"
    error = run_lammps(structures.water(), tiny_pet, options=options).error
    assert "has no such uncertainty of the energies of atoms" in error


def test_uncertainty_of_atoms_for_fix_pair(run_lammps, pair_model):
    commands = """
fix 1 all nve
fix 2 all pair 1 metatomic-tc uncertainty 0
compute total all reduce sum f_2
compute largest all reduce max f_2
thermo_style custom step c_total c_largest
run 1
"""
    log = run_lammps(structures.water(), pair_model(extras=True), ranks=2, commands=commands).log
    assert re.search(r"^ +1 +1.76\d* +0.2\d* *$", log, flags=re.MULTILINE), log


# ---- profile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_profile(run_lammps, tiny_pet, ranks):
    commands = "fix 1 all nve\nrun 3"
    options = "device cpu profile yes"
    log = run_lammps(
        structures.water(), tiny_pet, ranks=ranks, options=options, commands=commands
    ).log
    assert f"metatomic-tc: profile of 3 steps on {ranks} ranks, in s" in log
    lines = re.findall(r"^(\w[\w ]+?) *\| +(\S+) \| +(\S+) \| +(\S+) \| +(\S+)$", log, re.MULTILINE)
    table = {line[0]: [float(x) for x in line[1:]] for line in lines}
    for name in ["pairs for the model", "forward", "backward", "communication"]:
        low, average, high, share = table[name]
        assert 0.0 <= low <= average * 1.0001 and average <= high * 1.0001 and 0 <= share <= 100
    assert table["forward"][0] > 0.0 and table["backward"][0] > 0.0
    shares = [table[name][3] for name in list(table) if name in PROFILE]
    assert len(shares) == len(PROFILE) and sum(shares) == pytest.approx(100.0, abs=0.2)


PROFILE = [
    "LAMMPS neighbor lists",
    "pairs for the model",
    "input",
    "forward",
    "backward",
    "forward and backward",
    "output",
    "rest of the pair style",
    "communication",
    "rest of the run",
]


def test_no_profile_unless_asked(run_lammps, tiny_pet):
    log = run_lammps(structures.water(), tiny_pet, commands="fix 1 all nve\nrun 1").log
    assert "profile" not in log


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "style, message",
    [
        ("tf32x3 scal 0.5", "unknown keyword 'scal', the keywords are device, extensions, "),
        ("tf32x3 variants/energy x", "variant/non_conservative_stress, non_conservative, unc"),
        ("tf32x3 scale half", "scale must be a number, not 'half'"),
        ("tf32x3 layers !", "layers '!': the pattern for the paths of layers is empty"),
        ("fp32 layers *gnn*", "keyword 'layers' has no effect in mode fp32"),
        ("tf32x3 non_conservative energy", "must be on, off, forces or stress, not 'energy'"),
        ("tf32x3 uncertainty_threshold 0", "must be a number above 0 or off, not '0'"),
        ("tf32x3 profile maybe", "profile must be yes or no, not 'maybe'"),
        ("tf32x3 memory small", "memory must be auto, fast or lean, not 'small'"),
        (
            "tf32x3 variant/non_conservative_force a",
            "'variant/non_conservative_force' has no effect without non_conservative on or forces",
        ),
        (
            "tf32x3 non_conservative forces variant/non_conservative_stress a",
            "'variant/non_conservative_stress' has no effect without non_conservative on or stress",
        ),
        (
            "tf32x3 uncertainty_threshold off variant/energy_uncertainty a",
            "'variant/energy_uncertainty' has no effect with uncertainty_threshold off",
        ),
        (
            "tf32x3 variant/non_conservative_force a variant/non_conservative_forces a",
            "are the same, give one of them",
        ),
    ],
)
def test_mistakes(run_lammps, style, message):
    result = run_lammps(structures.water(), None, pair=f"pair_style metatomic-tc {style}")
    assert result.code != 0
    assert message in result.error
