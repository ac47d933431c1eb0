"""`metatomic-tc validate`."""

import contextlib
import dataclasses
import html.parser
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
from metatomic_tc.cli import main
from metatomic_tc.model_files import ModelFileError
from metatomic_tc.validate import (
    conservation,
    driver,
    lammps,
    relaxation,
    results,
    single_point,
    smoothness,
    speed,
    structures,
    validate,
    verdicts,
)
from metatomic_tc.validate.evaluation import Evaluation, Evaluators
from metatomic_tc.validate.settings import TESTS, Settings, quick_settings, reductions

pytestmark = pytest.mark.filterwarnings("ignore")

#: Small enough for seconds, with a model of H and O
SMALL = Settings(
    single_point=("water-24",),
    layer_rows=64,
    pull_structure="water-24",
    pull_atoms=(23,),
    pull_range=(1.0, 2.0),
    pull_points=12,
)
STATIC = ["single_point", "smoothness"]


@pytest.fixture(scope="module")
def network(made_once):
    """Writes a model of network_model.py, in a process of its own."""

    def find_or_write(kind: str = "float32") -> Path:
        def write(path: Path) -> None:
            script = Path(__file__).with_name("network_model.py")
            subprocess.run([sys.executable, script, path, kind], check=True)

        return made_once(f"network-{kind.replace(' ', '-')}.pt", write)

    return find_or_write


@pytest.fixture(scope="module")
def static_run(network, tmp_path_factory):
    """Directory and data of single points and a curve; `damaged` lacks the low slices of tf32x3."""
    directory = tmp_path_factory.mktemp("validate") / "report"
    others = {"damaged": lambda make: make("tf32"), "same": lambda make: make("fp32")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluators, "others", others)
        data = validate(
            network(),
            ["fp32", "tf32x3", "tf32", "damaged", "same"],
            "cpu",
            tests=STATIC,
            output=directory,
            settings=SMALL,
            command="metatomic-tc validate <model>",
        )
    return directory, data


class Page(html.parser.HTMLParser):
    """What is in a page."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.captions, self.images, self.headers, self.text = [], [], [], [], ""
        self.links = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "img":
            self.images.append(attributes)
        if tag in ("a", "script", "link"):
            self.links.append(attributes.get("href") or attributes.get("src"))
        if tag == "th":
            self.headers.append(attributes)
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "caption":
            self.captions.append(data)


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, verdict",
    [(0, "pass"), (2, "pass"), (2.1, "warn"), (5, "warn"), (5.1, "fail"), (math.nan, "fail")],
)
def test_a_rule_passes_warns_and_fails(value, verdict):
    rule = verdicts.Rule("single_point", "x", "", "eV", 2, 5)
    assert rule.judge(value, 1.0) == verdict


def test_numbers_below_the_floor_pass_whatever_the_yardstick():
    rule = verdicts.Rule("single_point", "x", "", "eV", 2, 5, 1e-3)
    assert rule.judge(1e-3, 0.0) == "pass"
    assert rule.judge(2e-3, 0.0) == "fail"


def test_the_worst_rule_decides():
    verdict, found = verdicts.judge("single_point", {"force_rms": (3e-6, 1e-6), "energy": (0, 0)})
    assert verdict == "warn"
    assert [one["verdict"] for one in found] == ["pass", "warn"]
    verdict, _ = verdicts.judge("single_point", {"force_rms": (1e-3, 1e-6), "energy": (0, 0)})
    assert verdict == "fail"


def test_rules_are_complete():
    assert {rule.test for rule in verdicts.RULES} == set(TESTS)
    names = [(rule.test, rule.quantity) for rule in verdicts.RULES]
    assert len(set(names)) == len(names)
    assert all(rule.passes <= rule.warns and rule.meaning for rule in verdicts.RULES)
    json.dumps(verdicts.rules_as_json(), allow_nan=False)


class Made:
    """A context with made-up results."""

    def __init__(self, test: str, found: dict, settings=None):
        self.modes = [name for name in found if name == "fp32" or name in ("good", "bad")]
        self.settings = settings or Settings()
        self._test, self._found = test, found
        self.results = self

    def of(self, test, mode):
        return self._found.get(mode, {})

    def get(self, test, mode, structure):
        return self._found.get(mode, {}).get(structure)


def verdicts_of(module, context) -> dict[str, str]:
    found = module.quantities(context)
    return {mode: verdicts.judge(module.TEST, found[mode])[0] for mode in found}


def test_single_points_of_made_up_errors():
    def errors(scale):
        return {"energy": -scale, "force_rms": scale, "force_max": 3 * scale, "stress_rms": scale}

    found = {
        "fp32": {"a": errors(1e-6), "b": errors(1e-6)},
        "good": {"a": errors(1.9e-6), "b": errors(1e-6)},
        "bad": {"a": errors(1e-6), "b": errors(1e-4)},
    }
    context = Made("single_point", found)
    assert verdicts_of(single_point, context) == {"fp32": "pass", "good": "pass", "bad": "fail"}
    # what is uncertain in FP32 itself is allowed to the modes
    found[single_point.REORDERED] = {"a": errors(1e-4), "b": errors(1e-4)}
    assert verdicts_of(single_point, context)["bad"] == "pass"


def test_smoothness_of_made_up_curves():
    random = np.random.default_rng(0)
    x = np.linspace(1, 6, 60)

    def curve(noise):
        energies = np.sin(x) + noise * random.normal(size=60)
        return {"a": {"energies": energies.tolist(), "forces": [], "heights": x.tolist()}}

    found = {"fp64": curve(0), "fp32": curve(1e-6), "good": curve(1.2e-6), "bad": curve(1e-4)}
    context = Made("smoothness", found)
    assert verdicts_of(smoothness, context) == {"fp32": "pass", "good": "pass", "bad": "fail"}
    # a smooth deviation is no roughness
    assert smoothness.roughness(1e-3 * x) < 1e-12


def test_drifts_of_made_up_energies():
    times = np.arange(3000) * 0.01
    random = np.random.default_rng(1)

    def energies(drift, noise=0.02):
        return conservation.analyse(times, drift * times + noise * random.normal(size=len(times)))

    found = {
        "fp32": {"a": energies(0.0)},
        "good": {"a": energies(-0.0002)},
        "bad": {"a": energies(0.05)},
    }
    verdict = verdicts_of(conservation, Made("conservation", found))
    assert verdict == {"fp32": "pass", "good": "pass", "bad": "fail"}
    found["bad"]["a"] = energies(0.0, 0.1)  # no drift, but it fluctuates
    assert verdicts_of(conservation, Made("conservation", found))["bad"] == "fail"


def test_the_drift_of_correlated_energies_is_within_its_uncertainty():
    random = np.random.default_rng(2)
    times = np.arange(4000) * 0.01
    inside = 0
    for _ in range(40):
        noise = np.zeros(len(times))
        kicks = random.normal(size=len(times))
        for i in range(1, len(times)):
            noise[i] = 0.95 * noise[i - 1] + kicks[i]
        found = conservation.analyse(times, 0.3 * times + noise)
        inside += abs(found["drift"] - 0.3) < 2 * found["drift_uncertainty"]
    assert inside >= 30  # about 0.92 of them, with 8 degrees of freedom
    with pytest.raises(ValueError, match="too few"):
        conservation.analyse([0, 1], [0, 0])
    with pytest.raises(ArithmeticError):
        conservation.analyse(times, np.full(len(times), np.nan))


def test_relaxations_of_made_up_steps():
    settings = Settings(relax_optimizers=("ASE FIRE2",))

    def runs(*steps):
        found = {}
        for i, count in enumerate(steps):
            forces = np.geomspace(1, 0.9e-3 if count else 1.3e-3, (count or 1000) + 1).tolist()
            found[str(i)] = relaxation.summary(forces, settings) | {"optimizer": "ASE FIRE2"}
        return found

    found = {"fp32": runs(218, 218, 218), "good": runs(218, 222, 218), "bad": runs(218, 218, None)}
    context = Made("relaxation", found, settings)
    assert verdicts_of(relaxation, context) == {"fp32": "pass", "good": "pass", "bad": "fail"}
    assert found["bad"]["0"]["reached_within"] == {"500": True, "1000": True}
    found["bad"] = runs(260, 260, 260)
    assert verdicts_of(relaxation, context)["bad"] == "warn"
    # where FP32 does not arrive either, the force that is reached is compared
    found["fp32"] = found["bad"] = runs(None, None, None)
    assert verdicts_of(relaxation, context)["bad"] == "pass"


def test_errors_have_the_units_they_claim():
    atoms = structures.load_one("water-24")
    exact = Evaluation(np.zeros(24), np.zeros((24, 3)), np.zeros((3, 3)))
    found = Evaluation(np.full(24, 1e-3), np.full((24, 3), -2.0), np.full((3, 3), 0.5))
    errors = single_point.differences(found, exact, atoms)
    assert errors["energy"] == pytest.approx(1e-3) == errors["atom_energy_rms"]
    assert errors["force_mean"] == errors["force_rms"] == errors["force_max"] == 2.0
    assert errors["stress_mean"] == errors["stress_max"] == 0.5
    with pytest.raises(ArithmeticError):
        single_point.differences(Evaluation(np.full(24, np.nan), None, None), exact, atoms)


# ---- structures ----------------------------------------------------------------------------------


def test_default_structures_can_be_read():
    for name in structures.DEFAULTS:
        structure = structures.load_one(name)
        number = int(name.rpartition("-")[2]) if name[-1].isdigit() else 66
        assert len(structure.atoms) == number and structure.has_stress


def test_reordered_atoms_find_their_places():
    structure = structures.load_one("water-24")
    other, places = structures.reordered(structure, 3)
    assert (other.atoms.positions[places] == structure.atoms.positions).all()
    assert (other.atoms.positions != structure.atoms.positions).any()


def test_the_curve_starts_and_ends_at_its_heights():
    structure = structures.load_one("pt111-co")
    heights, path = smoothness.curve(structure, Settings())
    assert len(heights) == 60 and (heights[0], heights[-1]) == (1.2, 6.0)
    symbols = structure.atoms.get_chemical_symbols()
    top = structure.atoms.positions[[s == "Pt" for s in symbols], 2].max()
    for height, point in zip(heights, path, strict=True):
        assert point.atoms.positions[symbols.index("C"), 2] - top == pytest.approx(height, abs=1e-5)
        assert np.allclose(point.atoms.positions[:64], structure.atoms.positions[:64])
    bond = [p.atoms.get_distance(symbols.index("C"), symbols.index("O")) for p in path]
    assert np.ptp(bond) < 1e-5


def test_boxes_for_speed():
    unit = structures.load_one("water-192")
    assert [len(speed.enlarged(unit, n).atoms) for n in (192, 5184, 17280)] == [192, 5184, 17280]
    cell = speed.enlarged(unit, 5184).atoms.cell.lengths()
    assert np.ptp(cell) < 1e-3


def test_what_is_reduced_is_said():
    assert reductions(Settings()) == []
    for on_gpu in (True, False):
        assert any("picoseconds" in line for line in reductions(quick_settings(on_gpu)))


# ---- a run ---------------------------------------------------------------------------------------


def test_verdicts_of_a_run(static_run):
    _, data = static_run
    assert data["verdicts"]["tf32x3"] == {"single_point": "pass", "smoothness": "pass"}
    assert data["verdicts"]["fp32"] == {"single_point": "pass", "smoothness": "pass"}
    assert data["verdicts"]["same"] == {"single_point": "pass", "smoothness": "pass"}
    for mode in ("tf32", "damaged"):
        assert data["verdicts"][mode] == {"single_point": "fail", "smoothness": "fail"}
    assert data["exit_code"] == 1 and data["finished"] and data["reference"] == "fp64"
    assert data["problems"] == []


def test_every_number_is_in_the_json(static_run):
    directory, data = static_run
    written = json.loads((directory / "report.json").read_text())
    assert written == json.loads(json.dumps(data))
    found = written["results"]["single_point"]["tf32"]["water-24"]
    for key in ("energy", "force_rms", "force_max", "stress_rms", "force_max_from_fp32"):
        assert key in found
    assert len(written["results"]["smoothness"]["fp64"]["water-24"]["energies"]) == 12
    shapes = written["results"]["layers"]
    assert set(shapes["tf32x3"]) == {"32 -> 128", "128 -> 64"}
    assert shapes["tf32"]["128 -> 64"]["error_rms"] > 100
    assert shapes["tf32x3"]["128 -> 64"]["error_rms"] < 5
    assert written["versions"]["torch"] and written["rules"] == verdicts.rules_as_json()


def test_the_page(static_run):
    directory, _ = static_run
    text = (directory / "report.html").read_text()
    page = Page(text)
    assert page.captions[0] == "Verdict by mode and test"
    assert "What they found" in page.captions
    assert text.index("Verdict by mode") < text.index("What was run")
    assert all("scope" in header for header in page.headers)
    assert all(image["alt"] for image in page.images)
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    assert len(page.images) == 2
    assert set(page.links) == {"#rules"}  # nothing from elsewhere
    assert "metatomic-tc validate <model>" in page.text
    assert "<td>not judged" not in text
    assert text.count("@media print") == 1


def test_results_are_resumed(static_run, network, monkeypatch):
    directory, data = static_run
    monkeypatch.setattr(single_point, "_references", lambda *_: pytest.fail("computed again"))
    options = {"device": "cpu", "output": directory, "settings": SMALL, "resume": True}
    again = validate(network(), ["tf32x3"], tests=["single_point"], **options)
    assert again["modes"] == ["fp32", "tf32x3"] and again["exit_code"] == 0
    assert again["results"]["single_point"] == data["results"]["single_point"]


def test_a_report_is_not_written_over(static_run, network):
    directory, _ = static_run
    before = (directory / "report.json").read_bytes()
    with pytest.raises(ModelFileError, match="has a report already; give --resume"):
        validate(network(), device="cpu", output=directory, settings=SMALL)
    assert (directory / "report.json").read_bytes() == before


def test_other_settings_are_not_resumed(static_run, network):
    directory, _ = static_run
    before = (directory / "report.json").read_bytes()
    with pytest.raises(ModelFileError, match="pull_points = 12 and is now 60"):
        validate(
            network(), device="cpu", output=directory, resume=True,
            settings=Settings(**{**SMALL.__dict__, "pull_points": 60}),
        )  # fmt: skip
    with pytest.raises(ModelFileError, match="model sha256"):
        validate(
            network("float64"), device="cpu", output=directory, resume=True, settings=SMALL
        )  # fmt: skip
    assert (directory / "report.json").read_bytes() == before


def test_ctrl_c_keeps_what_is_done(network, tmp_path, monkeypatch):
    calls = []

    def interrupt(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*arguments, **options)

    measured = single_point._measure
    monkeypatch.setattr(single_point, "_measure", interrupt)
    options = {"device": "cpu", "output": tmp_path, "settings": SMALL, "tests": STATIC}
    with pytest.raises(KeyboardInterrupt):
        validate(network(), ["tf32x3"], **options)
    data = json.loads((tmp_path / "report.json").read_text())
    assert list(data["results"]["single_point"]) == ["fp32"] and not data["finished"]
    assert "was interrupted" in Page((tmp_path / "report.html").read_text()).text
    monkeypatch.setattr(single_point, "_measure", measured)
    data = validate(network(), ["tf32x3"], resume=True, **options)
    assert data["finished"] and data["verdicts"]["tf32x3"]["single_point"] == "pass"
    assert not list(tmp_path.glob("*.part"))


def test_an_fp64_model_is_accepted(network, tmp_path):
    data = validate(
        network("float64"), ["tf32x3"], "cpu", tests=STATIC, output=tmp_path, settings=SMALL
    )
    assert data["model_dtype"] == "float64"
    assert data["verdicts"]["tf32x3"] == {"single_point": "pass", "smoothness": "pass"}
    assert data["exit_code"] == 0


def test_a_model_without_fp64_is_compared_with_fp32(network, tmp_path):
    data = validate(
        network("only float32"), ["tf32"], "cpu", tests=STATIC, output=tmp_path, settings=SMALL
    )
    assert data["reference"] == "fp32"
    assert any("this model is for FP32 only" in p["message"] for p in data["problems"])
    assert data["verdicts"]["tf32"] == {"single_point": "fail", "smoothness": "fail"}


def test_lammps_is_ended_with_the_script_that_started_it(tmp_path):
    script = "region r block 0 1 0 1 0 1\ncreate_box 1 r\nmass 1 1\nrun 2000000000\n"
    run = lammps.Run(script, tmp_path, "long")
    time.sleep(2)
    assert run.process.poll() is None
    run.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(run.process.pid, 0)
    with pytest.raises(RuntimeError, match="LAMMPS failed"):
        run.check()


@pytest.fixture
def signals_not_ignored():
    """Signals do what they usually do, in new processes, too: shells and nohup can ignore them."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_ended_is_not_interrupted_again(number, signals_not_ignored):
    before = signal.getsignal(number)
    ended = False
    with pytest.raises(KeyboardInterrupt), driver._interrupted_once():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(other)
            ended = True
            raise
    assert ended and signal.getsignal(number) == before


def test_interrupted_dynamics_are_analysed_and_continued(network, tmp_path, monkeypatch):
    settings = Settings(
        nve_structure="water-24", nve_picoseconds=0.4, nve_every=2, nve_temperature=50.0
    )
    options = {
        "device": "cpu", "tests": ["conservation"], "output": tmp_path, "settings": settings,
        "resume": True,
    }  # fmt: skip
    shown = conservation.Bar.__call__

    def interrupt(bar, done):
        shown(bar, done)
        if done > 0.15:
            raise KeyboardInterrupt

    monkeypatch.setattr(conservation.Bar, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        validate(network(), ["tf32x3"], **options)
    data = json.loads((tmp_path / "report.json").read_text())
    runs = data["results"]["conservation"]
    lengths = {mode: runs[mode]["water-24"]["picoseconds"] for mode in ("fp32", "tf32x3")}
    assert lengths["fp32"] == lengths["tf32x3"] and 0.0 < lengths["fp32"] < 0.4
    assert data["verdicts"]["tf32x3"]["conservation"] in ("pass", "warn", "fail")
    assert data["exit_code"] == 1 and not data["finished"]
    assert "Interrupted before the end" in Page((tmp_path / "report.html").read_text()).text

    monkeypatch.setattr(conservation.Bar, "__call__", shown)
    data = validate(network(), ["tf32x3"], **options)
    run = data["results"]["conservation"]["fp32"]["water-24"]
    assert run["picoseconds"] == pytest.approx(0.4)
    assert run["times"] == pytest.approx(np.arange(401) * 0.001)
    assert "Interrupted before" not in Page((tmp_path / "report.html").read_text()).text


def test_dynamics_are_continued(network, tmp_path):
    settings = Settings(
        nve_structure="water-24", nve_picoseconds=0.06, nve_every=5, nve_temperature=50.0
    )
    options = {
        "device": "cpu", "tests": ["conservation"], "output": tmp_path, "settings": settings,
        "resume": True,
    }  # fmt: skip
    first = validate(network(), ["fp32"], **options)["results"]["conservation"]
    run = first["fp32"]["water-24"]
    assert run["times"] == pytest.approx(np.arange(25) * 0.0025)

    # as if it had been interrupted between steps 50 and 100
    directory = tmp_path / "work" / "nve-water-24-fp32"
    (directory / "nve.restart.b").unlink()
    log = directory / "nve-0.log"
    log.write_text(log.read_text()[: log.read_text().index("\n        90 ")])
    data = json.loads((tmp_path / "report.json").read_text())
    del data["results"]["conservation"]["fp32"]["water-24"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    second = validate(network(), ["fp32"], **options)["results"]["conservation"]
    assert (directory / "nve-1.log").exists() and "read_restart" in (
        directory / "in.nve-1"
    ).read_text()
    again = second["fp32"]["water-24"]
    assert again["times"] == run["times"]
    assert again["changes"] == pytest.approx(run["changes"], abs=1e-3)


@pytest.mark.first
def test_interrupted_relaxations_in_processes(network, tmp_path, signals_not_ignored):
    """
    What is done is kept, and is that of a single process; nothing is left running. Ctrl-C reaches
    all processes of a terminal. The script has no guard against its import by workers.
    """
    settings = Settings(
        relax_structure="water-24", relax_fmax=1e-6, relax_limits=(8,), relax_repeats=2
    )
    arguments = {"device": "cpu", "tests": ["relaxation"], "jobs": 2, "resume": True}
    (tmp_path / "script.py").write_text(f"""
import sys
from metatomic_tc.validate import relaxation, validate
from metatomic_tc.validate.evaluation import Evaluators
from metatomic_tc.validate.settings import Settings

relaxation._wants_workers = lambda context: True
Evaluators.others = {{"same": lambda make: make("fp32")}}
try:
    validate(
        {str(network())!r}, ["tf32x3", "same"], output="report", settings={settings!r},
        **{arguments!r},
    )
except KeyboardInterrupt:
    sys.exit(130)
""")

    def processes() -> list[str]:
        found = []
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if link.readlink().is_relative_to(tmp_path):
                    found.append(link.with_name("cmdline").read_text())
        return found

    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        while not list(tmp_path.glob("report/work/*/in.relax")) and process.poll() is None:
            time.sleep(0.1)
        running = processes()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert sum("spawn_main" in line for line in running) == 2
    assert process.returncode == 130 and "Traceback" not in errors
    time.sleep(0.5)
    assert processes() == []

    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["problems"] == [] and not data["finished"]
    found = data["results"]["relaxation"]
    assert sum(map(len, found.values())) >= 5
    settings = dataclasses.replace(settings, relax_optimizers=(relaxation.ASE,))
    data = validate(network(), ["tf32x3"], output=tmp_path / "here", settings=settings, **arguments)
    here = data["results"]["relaxation"]
    for mode, runs in found.items():
        for key, run in runs.items():
            assert run == here["fp32" if mode == "same" else mode][key]
    assert here["fp32"] != here["tf32x3"]


# ---- wrong input ---------------------------------------------------------------------------------


def test_wrong_structures_do_not_lose_the_others(network, tmp_path):
    good = structures.load_one("water-24").atoms
    ase.io.write(tmp_path / "good.xyz", good)
    open_box = good.copy()
    open_box.pbc = False
    ase.io.write(tmp_path / "molecules.xyz", open_box)
    (tmp_path / "broken.xyz").write_text("no structure\n")
    files = [tmp_path / name for name in ("good.xyz", "molecules.xyz", "broken.xyz", "no.xyz")]
    data = validate(
        network(), ["tf32x3"], "cpu", [*files, "pt111-co"], ["single_point"],
        tmp_path / "report", settings=SMALL,
    )  # fmt: skip
    found = data["results"]["single_point"]["tf32x3"]
    assert set(found) == {"good.xyz", "molecules.xyz"}
    assert "stress_rms" in found["good.xyz"] and "stress_rms" not in found["molecules.xyz"]
    assert found["molecules.xyz"]["force_rms"] > 0
    messages = "\n".join(p["message"] for p in data["problems"])
    assert "molecules.xyz: no stress, since its cell is not periodic" in messages
    assert "broken.xyz: ASE cannot read it" in messages
    assert "there is no such file" in messages
    assert "pt111-co: the model does not know C, Pt; it knows H, O" in messages
    assert data["verdicts"]["tf32x3"]["single_point"] == "pass"
    assert "What could not be computed" in Page((tmp_path / "report/report.html").read_text()).text


def test_a_model_without_forces(network, tmp_path):
    data = validate(
        network("no forces"), ["tf32x3"], "cpu", tests=["single_point"], output=tmp_path,
        settings=SMALL,
    )  # fmt: skip
    assert "no forces and no stress" in data["problems"][0]["message"]
    assert "energy" in data["results"]["single_point"]["tf32x3"]["water-24"]
    assert data["verdicts"]["tf32x3"]["single_point"] == "pass"


def test_a_model_without_energy(network, tmp_path):
    with pytest.raises(ModelFileError, match="has no energy, only: feature"):
        validate(network("no energy"), device="cpu", output=tmp_path)


def test_a_test_that_was_named_must_be_possible(network, tmp_path, capsys):
    path = str(network())
    arguments = ["validate", path, "--device", "cpu", "--modes", "fp32", "-o", str(tmp_path)]
    arguments += ["--quick", "--tests", "smoothness"]
    assert main(arguments) == 1
    assert "the model does not know C, Pt" in capsys.readouterr().out


def test_a_mode_that_fails_alone_is_failed(network, tmp_path, monkeypatch):
    class Broken:
        mode = None

        def evaluate(self, structure):
            raise RuntimeError("broken kernel\nand more")

    monkeypatch.setattr(Evaluators, "others", {"broken": lambda make: Broken()})
    data = validate(
        network(), ["broken"], "cpu", tests=["single_point"], output=tmp_path, settings=SMALL
    )
    assert data["verdicts"]["broken"] == {"single_point": "fail"}
    assert data["verdicts"]["fp32"] == {"single_point": "pass"}
    assert data["problems"][0]["message"] == "broken kernel"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--modes", "bf16x3"], "bf16x3"),
        (["--tests", "speeed"], "single_point, smoothness"),
        (["--pull-range", "1"], "2 number"),
        (["--picoseconds", "0"], "positive"),
        (["--pull-atoms", "-1"], "--pull-atoms"),
    ],
)
def test_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["validate", "model.pt", *options])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_files(tmp_path, network, capsys):
    assert main(["validate", str(tmp_path / "no.pt")]) == 2
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "report.json").write_text("[]")
    arguments = ["validate", str(network()), "--device", "cpu", "-o", str(tmp_path)]
    assert main([*arguments, "--resume"]) == 2
    assert "not a report of validate" in capsys.readouterr().err


def test_problems_say_what_matters(tmp_path):
    head = dict.fromkeys(results.IDENTITY)
    found = results.Results(tmp_path / "r.json", head, False)
    text = "The following operation failed in the TorchScript interpreter.\nTraceback\nReason: x"
    found.problem("single_point", "tf32", "a", RuntimeError(text))
    assert found.data["problems"][0]["message"] == "Reason: x"


# ---- the demo model ------------------------------------------------------------------------------


@pytest.mark.first
def test_the_demo_model_on_the_cpu(demo_model, tmp_path, capfd):
    """All tests but the whole amount of each: tf32 is caught, tf32x3 is not."""
    options = ["--device", "cpu", "--modes", "tf32x3,tf32", "--quick", "-o", str(tmp_path)]
    code = main(["validate", str(demo_model), *options, "--tests", "single_point,conservation"])
    data = json.loads((tmp_path / "report.json").read_text())
    assert code == 1 and data["problems"] == []
    assert data["verdicts"]["fp32"] == {"single_point": "pass", "conservation": "pass"}
    assert data["verdicts"]["tf32x3"] == {"single_point": "pass", "conservation": "pass"}
    assert data["verdicts"]["tf32"]["single_point"] == "fail"
    run = data["results"]["conservation"]["tf32x3"]["water-24"]
    assert run["times"][-1] == pytest.approx(0.008) and run["changes"][0] == 0
    output = capfd.readouterr()
    assert "Quick: smaller" in output.err and "emulated" in output.err
    assert "Single point" in output.out


@pytest.mark.first
def test_everything_quick(demo_model, tmp_path):
    options = ["--device", "cpu", "--quick", "-o", str(tmp_path)]
    assert main(["validate", str(demo_model), *options]) == 0
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["problems"] == [] and data["finished"]
    for mode in ("fp32", "tf32x3", "bf16x9"):
        assert set(data["verdicts"][mode]) == set(TESTS) - {"speed"}
    assert "emulated" in data["not_judged"]["speed"]
    assert data["results"]["speed"]["tf32x3"]
