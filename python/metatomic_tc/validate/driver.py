"""Runs the tests of a validation one after the other, and judges them."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .. import info, model_files, modes
from ..files import write_atomically
from ..model_files import ModelFileError
from ..progress import Steps
from . import (
    conservation,
    layers,
    relaxation,
    report,
    single_point,
    smoothness,
    speed,
    structures,
    verdicts,
)
from .evaluation import Evaluators
from .results import Results
from .settings import TESTS, TITLES, Settings, quick_settings, reductions

MODULES = {
    "single_point": single_point,
    "smoothness": smoothness,
    "conservation": conservation,
    "relaxation": relaxation,
    "speed": speed,
}
FORMAT = 1


class Context:
    """What the tests work with."""

    def __init__(self, model, evaluators, device, settings, results, directory, resume, jobs, pair):
        #: the file
        self.model: Path = model
        self.evaluators: Evaluators = evaluators
        self.device: torch.device = device
        self.settings: Settings = settings
        self.results: Results = results
        #: where the report is written; large and unfinished things are in ``work`` in it
        self.directory: Path = directory
        self.resume: bool = resume
        #: runs of LAMMPS, and on a GPU relaxations in ASE, at the same time
        self.jobs: int = jobs
        #: keywords of the pair style
        self.pair_options: str = pair
        self.modes: list[str] = results.data["modes"]

    def structures(self, test: str, sources, every_frame: bool = False) -> list:
        """The structures that the model knows; of the others the report says why not."""
        found = []
        for source in sources:
            try:
                loaded = structures.load(source, ":" if every_frame else "0")
            except structures.StructureError as error:
                self.results.problem(test, None, str(source), error)
                continue
            for structure in loaded:
                try:
                    structure.check_elements(self.evaluators.types)
                    found.append(structure)
                except structures.StructureError as error:
                    self.results.problem(test, None, structure.name, error)
        return found

    @contextlib.contextmanager
    def guard(self, test: str, mode: str, structure: str):
        """Whatever goes wrong in the block is noted, and the rest goes on."""
        try:
            yield
        except Exception as error:
            self.results.problem(test, mode, structure, error)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def side_by_side(self, test: str, starts: dict, running: dict, show: Callable) -> None:
        """
        Run :attr:`jobs` jobs at a time, and put each result into the report when it is there.

        :param starts: functions that start the jobs, by mode and structure. A job has ``done`` and
            ``result``, as a future has.
        :param running: the jobs that run, empty here; what is left of an interrupted call is to be
            ended by the caller
        :param show: gets the number of jobs that ended
        """
        waiting = list(starts)
        while waiting or running:
            while waiting and len(running) < self.jobs:
                name = waiting.pop(0)
                with self.guard(test, *name):
                    running[name] = starts[name]()
            time.sleep(0.2)
            for name in [name for name, job in running.items() if job.done()]:
                job = running.pop(name)
                with self.guard(test, *name):
                    self.results.put(test, *name, job.result())
            show(len(starts) - len(waiting) - len(running))

    def reference(self, structure):
        """The evaluator in FP64, or None if the model cannot be computed so."""
        if self.results.data["reference"] == "fp32":
            return None
        try:
            return self.evaluators.fp64(structure)
        except RuntimeError as error:
            self.results.data["reference"] = "fp32"
            self.results.problem("single_point", None, "model", error)
            return None


def validate(
    model: str | os.PathLike,
    modes: list[str] | None = None,
    device: str | torch.device | None = None,
    structures: list[str | os.PathLike] | None = None,
    tests: list[str] | None = None,
    output: str | os.PathLike = "validation",
    resume: bool = False,
    quick: bool = False,
    settings: Settings | None = None,
    extensions: str | os.PathLike | None = None,
    jobs: int | None = None,
    command: str | None = None,
) -> dict:
    """
    Compare modes with FP32 and FP64 in single points, smoothness, energy conservation, relaxation
    and speed. Writes ``report.json`` after every result, and ``report.html`` at the end.

    :param model: an exported metatomic model
    :param modes: names of modes; by default all that the device supports, except ``tf32``.
        ``fp32`` is always included.
    :param device: by default ``cuda`` if there is a GPU, else ``cpu``, where modes are emulated
    :param structures: files for the single-point test, in the place of those that come with the
        package
    :param tests: of :data:`TESTS`, by default all; a test that is named here and cannot be judged
        counts as failed
    :param output: directory of the report
    :param resume: continue the report that is in this directory
    :param quick: smaller experiments, see :func:`quick_settings`
    :param settings: all numbers, in the place of ``quick``
    :param extensions: directory with the TorchScript extensions of the model, if it has any
    :param jobs: runs of LAMMPS at the same time, by default one for each mode on a GPU, and two on
        a CPU. On a GPU also relaxations in ASE, in as many processes, which load the model each.
    :param command: the command line, for the report
    :return: the content of ``report.json``. ``verdicts[mode][test]`` is ``pass``, ``warn`` or
        ``fail``, and ``exit_code`` 1 if something failed or is not finished.
    :raises ModelFileError: if ``model`` is something else, or cannot be continued
    :raises ValueError: for modes that the device does not support, or unknown tests
    :raises RuntimeError: for devices that do not work
    :raises KeyboardInterrupt: with what is done written
    """
    for package, used in [("ase", "structures"), ("vesin", "neighbor lists")]:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"validate needs the package {package} for {used}; install it with: "
                "pip install 'metatomic-tc[validate]'"
            )
    model = Path(model)
    model_files.expect_exported_model(model)
    model_files.expect_extensions_directory(extensions)
    if output is None or (Path(output).exists() and not Path(output).is_dir()):
        raise ModelFileError(f"'{output}' is a file, but a directory for the report was expected.")
    explicit = tests is not None
    tests = [test for test in TESTS if test in (tests or TESTS)] if _known(tests) else []
    device = _device(device)
    settings = settings or (quick_settings(device.type == "cuda") if quick else Settings())
    if structures:
        settings = dataclasses.replace(settings, single_point=tuple(map(str, structures)))
    names = _modes(modes, device, settings.quick)

    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    evaluators = Evaluators(model, device, extensions)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    head = {
        "format": FORMAT,
        "model": model.name,
        "model_name": evaluators.name,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "model_dtype": evaluators.dtype,
        "reference": "fp64",
        "device": str(device),
        "gpu": gpu,
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "command": command or "metatomic_tc.validate(...)",
        "versions": info.versions([*info.PACKAGES, "ase", "vesin", "numpy"]),
        "modes": names,
        "tests": tests,
        "settings": settings.as_json(),
        "reduced": reductions(settings) if settings.quick else [],
        "emulated": device.type == "cpu",
        "finished": False,
        "rules": verdicts.rules_as_json(),
    }
    results = Results(directory / "report.json", head, resume)
    pair = f"device {device}"
    if extensions is not None:
        pair += f' extensions "{Path(extensions).absolute()}"'
    if jobs is None:
        jobs = len(names) if device.type == "cuda" else 2
    context = Context(model, evaluators, device, settings, results, directory, resume, jobs, pair)
    if head["reduced"]:
        print("Quick: smaller than the full validation:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in head["reduced"]), file=sys.stderr)
    if head["emulated"]:
        print("On the CPU the modes are emulated: right numbers, no speed.", file=sys.stderr)

    steps = Steps(len(tests), interleaved=True)
    try:
        for test in tests:
            with steps(TITLES[test]):
                MODULES[test].run(context)
                if test == "single_point":
                    layers.run(context)
        results.data["finished"] = True
    finally:
        judge(context, explicit)
        results.write()
        write_atomically(directory / "report.html", report.page(results.data))
    return results.data


def judge(context: Context, explicit: bool) -> None:
    """
    Add ``verdicts``, ``judged`` (what each rule found), ``not_judged`` and ``exit_code``.

    :param explicit: tests were named, so that each must be judged
    """
    data = context.results.data
    data["verdicts"] = {mode: {} for mode in context.modes}
    data["judged"] = {mode: {} for mode in context.modes}
    data["not_judged"] = {}
    for test in data["tests"]:
        quantities = MODULES[test].quantities(context)
        # What fails in FP32 as well is not the mode's fault.
        failed = {
            mode: {
                p["structure"] for p in data["problems"] if (p["test"], p["mode"]) == (test, mode)
            }
            for mode in context.modes
        }
        for mode in context.modes:
            own = failed[mode] - failed["fp32"]
            if mode in quantities:
                verdict, found = verdicts.judge(test, quantities[mode])
                data["judged"][mode][test] = found
                data["verdicts"][mode][test] = verdicts.FAIL if own else verdict
            elif own:
                data["verdicts"][mode][test] = verdicts.FAIL
        if not any(test in data["verdicts"][mode] for mode in context.modes):
            data["not_judged"][test] = _reason(context, test)
    found = [verdict for of_mode in data["verdicts"].values() for verdict in of_mode.values()]
    # Emulated modes have no speed to judge: that alone is no failure.
    missing = [test for test in data["not_judged"] if test != "speed"]
    nothing = not found and bool(missing)
    data["exit_code"] = int(
        verdicts.FAIL in found or nothing or (explicit and bool(missing)) or not data["finished"]
    )


def _reason(context: Context, test: str) -> str:
    if test == "speed" and context.results.of(test, "fp32"):
        return "measured, but not judged: the modes are emulated on the CPU"
    messages = [p["message"] for p in context.results.data["problems"] if p["test"] == test]
    if messages:
        return messages[0]
    return "no results" if context.results.data["finished"] else "not finished"


def _known(tests: list[str] | None) -> bool:
    for test in tests or []:
        if test not in TESTS:
            raise ValueError(f"found the test '{test}', but the choices are: {', '.join(TESTS)}")
    return True


def _device(device) -> torch.device:
    if device is None:
        device = "cpu"
        if torch.cuda.is_available() and modes.build_info()["cuda_architectures"]:
            device = "cuda"
    return modes.usable_device(device)


def _modes(names, device: torch.device, quick: bool) -> list[str]:
    supported = modes.supported_modes(device)
    if names is None:
        # tf32 is there for comparison only, and bf16x9-eager differs on GPUs with cuBLAS's only.
        left_out = ["tf32"] + (["bf16x9-eager"] if device.type == "cpu" else [])
        names = [mode for mode in supported if mode not in left_out]
        if quick and device.type == "cpu":
            names = [mode for mode in names if mode in ("fp32", "tf32x3", "bf16x9")]
    modes.expect_supported([mode for mode in names if mode not in Evaluators.others], device)
    return ["fp32", *dict.fromkeys(mode for mode in names if mode != "fp32")]


@contextlib.contextmanager
def _told_how_to_go_on(directory: Path):
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"\nWhat is done is in '{directory}'; the same command with --resume goes on with it.",
            file=sys.stderr,
        )
        raise


@contextlib.contextmanager
def _interrupted_once():
    """
    Batch systems and ``timeout`` end programs by SIGTERM, terminals by SIGHUP: what is done is kept
    then as after Ctrl-C. It takes seconds to end all that runs, and further signals wait for that.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # nohup ignores SIGHUP
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def interrupt(number, frame):
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(arguments) -> int:
    """The command; ``arguments`` are those of the command line."""
    device = _device(arguments.device)
    settings = quick_settings(device.type == "cuda") if arguments.quick else Settings()
    changes = {
        "pull_structure": arguments.pull,
        "pull_atoms": arguments.pull_atoms and tuple(arguments.pull_atoms),
        "pull_direction": arguments.pull_direction,
        "pull_range": arguments.pull_range,
        "pull_points": arguments.pull_points,
        "nve_structure": arguments.nve,
        "nve_picoseconds": arguments.picoseconds,
        "relax_structure": arguments.relax,
        "relax_fmax": arguments.fmax,
        "speed_atoms": arguments.atoms and tuple(arguments.atoms),
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    with _interrupted_once(), _told_how_to_go_on(Path(arguments.output)):
        data = validate(
            arguments.model,
            arguments.modes,
            device,
            arguments.structures,
            arguments.tests,
            arguments.output,
            arguments.resume,
            arguments.quick,
            dataclasses.replace(settings, **changes),
            arguments.extensions,
            arguments.jobs,
            shlex.join(["metatomic-tc", *arguments.command_line]),
        )
    print(report.text(data))
    print(f"\nwritten to {Path(arguments.output) / 'report.html'} and report.json")
    return data["exit_code"]
