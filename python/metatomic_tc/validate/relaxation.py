"""
Relaxation of a structure by ASE's FIRE2 and by LAMMPS's ``min_style fire``, several times with the
atoms in different orders, since the steps that it takes depend on rounding.

One relaxation leaves a GPU mostly idle, so that several run side by side: LAMMPS as it is, ASE in
processes that this one starts.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import types
import warnings
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
import torch

from ..progress import Bar
from . import lammps
from .evaluation import Evaluators, calculator
from .structures import Structure, load_one, reordered

TEST = "relaxation"
ASE, LAMMPS = "ASE FIRE2", "LAMMPS fire"


def run(context) -> None:
    """Relax in all modes."""
    settings = context.settings
    repeats = range(settings.relax_repeats)
    for structure in context.structures(TEST, [settings.relax_structure]):
        with _workers(context) as workers:
            starts: dict = {}
            for optimizer, repeat, mode in itertools.product(
                settings.relax_optimizers, repeats, context.modes
            ):
                key = f"{structure.name}, {optimizer}, {repeat + 1}"
                if context.results.get(TEST, mode, key) is not None:
                    continue
                if optimizer == LAMMPS:
                    start = functools.partial(_InLammps, context)
                elif workers is None or mode in context.evaluators.others:
                    start = functools.partial(_Here, context)
                else:
                    start = functools.partial(_in_worker, workers, context)
                starts[mode, key] = functools.partial(start, structure, mode, repeat)
            running: dict = {}
            try:
                context.side_by_side(TEST, starts, running, Bar("relaxations", len(starts)))
            except BaseException:
                for job in running.values():
                    if isinstance(job, lammps.Run):
                        job.stop()
                raise


def _order(structure: Structure, repeat: int) -> Structure:
    return structure if repeat == 0 else reordered(structure, repeat)[0]


class _Here:
    """A relaxation by ASE in this process, begun when its result is asked for."""

    def __init__(self, context, structure: Structure, mode: str, repeat: int):
        self._context, self._mode, self._start = context, mode, _order(structure, repeat)

    def done(self) -> bool:
        return True

    def result(self) -> dict:
        return _relax(self._context.evaluators(self._mode), self._start, self._context.settings)


def _relax(evaluator, start: Structure, settings) -> dict:
    from ase.optimize.fire2 import FIRE2

    atoms = start.atoms.copy()
    atoms.calc = calculator(evaluator)
    forces: list[float] = []
    with FIRE2(atoms, logfile=None) as optimizer:
        for _ in optimizer.irun(fmax=settings.relax_fmax, steps=settings.relax_limits[-1]):
            forces.append(float(np.linalg.norm(atoms.get_forces(), axis=1).max()))
            if not np.isfinite(forces[-1]):
                raise ArithmeticError(f"the forces are not finite in step {len(forces) - 1}")
    return summary(forces, settings) | {"optimizer": ASE, "energy": atoms.get_potential_energy()}


def _wants_workers(context) -> bool:
    return context.device.type == "cuda" and context.jobs > 1


@contextlib.contextmanager
def _workers(context):
    """
    Processes for relaxations by ASE on a GPU, else None. They begin when they are needed, and an
    interrupt ends them.
    """
    if not _wants_workers(context):
        yield None
        return
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")  # after a fork CUDA does not work
    with ProcessPoolExecutor(context.jobs, spawn, _begin, (os.getcwd(),)) as workers:
        try:
            yield workers
        except BaseException:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise


def _in_worker(workers, context, structure: Structure, mode: str, repeat: int) -> Future:
    """
    A relaxation in a worker.

    Workers that begin with it neither hear Ctrl-C, which is for this process, nor import the main
    module again, as is usual: a script that validates may do so at once.
    """
    main = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        # The structure is read again, since interrupted pools of Python 3.11 hang on large tasks.
        return workers.submit(_work, context.evaluators.arguments, mode, repeat, context.settings)
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


#: those of a worker
_evaluators = functools.cache(Evaluators)


def _begin(directory: str) -> None:
    """What a worker does first; it ends with the process that began it, however that ends."""
    os.chdir(directory)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(arguments: tuple, mode: str, repeat: int, settings) -> dict:
    start = _order(load_one(settings.relax_structure), repeat)
    return _relax(_evaluators(*arguments)(mode), start, settings)


class _InLammps(lammps.Run):
    """A relaxation by LAMMPS."""

    def __init__(self, context, structure: Structure, mode: str, repeat: int):
        actual = context.evaluators.mode_of(mode)
        if actual is None:
            raise ValueError(f"'{mode}' is not a mode of the pair style")
        self._settings = context.settings
        name = lammps.safe_name(f"relax-{structure.name}-{mode}-{repeat + 1}")
        directory = context.directory / "work" / name
        pair_style = f"{actual} {context.pair_options}"
        parts = lammps.setup(_order(structure, repeat), pair_style, context.model, directory)
        limit = self._settings.relax_limits[-1]
        super().__init__(
            f"{parts['before']}read_data start.data\n{parts['pair']}"
            "variable norm atom sqrt(fx*fx+fy*fy+fz*fz)\ncompute fmax all reduce max v_norm\n"
            "thermo_style custom step pe c_fmax\nthermo_modify format float %.12g flush yes\n"
            "thermo 1\nmin_style fire\nmin_modify norm max\n"
            f"minimize 0.0 {self._settings.relax_fmax} {limit} {100 * limit}\n",
            directory,
            "relax",
        )

    def result(self) -> dict:
        self.check()
        log = lammps.read_log(self.log)
        steps = dict(zip(map(int, log["Step"]), log["c_fmax"], strict=True))
        if not np.isfinite(list(steps.values())).all():
            raise ArithmeticError("the forces are not finite")
        found = summary([steps[step] for step in sorted(steps)], self._settings)
        return found | {"optimizer": LAMMPS, "energy": log["PotEng"][-1]}


def summary(forces: list[float], settings) -> dict:
    """
    What the report says about a run.

    :param forces: the largest force at the start and after each step, in eV/Å
    """
    reached = [step for step, force in enumerate(forces) if force <= settings.relax_fmax]
    steps = reached[0] if reached else None
    return {
        "steps": steps,
        "reached_within": {
            str(limit): steps is not None and steps <= limit for limit in settings.relax_limits
        },
        "lowest_force": min(forces),
        "forces": [float(f"{force:.4g}") for force in forces],
    }


def quantities(context) -> dict[str, dict[str, tuple[float, float]]]:
    """For each mode, what the verdicts look at: value and yardstick by quantity."""
    found: dict = {}
    target = context.settings.relax_fmax
    for mode in context.modes:
        pairs: dict = {}
        for optimizer in context.settings.relax_optimizers:
            mine, fp32 = (
                [r for r in context.results.of(TEST, name).values() if r["optimizer"] == optimizer]
                for name in (mode, "fp32")
            )
            if not mine or not fp32:
                continue
            missed = sum(run["steps"] is None for run in mine) / len(mine)
            missed -= sum(run["steps"] is None for run in fp32) / len(fp32)
            _keep_worst(pairs, "missed", (max(0.0, missed), 0.0))
            lowest = [max(target, max(r["lowest_force"] for r in runs)) for runs in (mine, fp32)]
            _keep_worst(pairs, "lowest_force", tuple(lowest))
            counts = [[r["steps"] for r in runs if r["steps"] is not None] for runs in (mine, fp32)]
            if all(counts):
                more = max(0.0, float(np.mean(counts[0]) - np.mean(counts[1])))
                spread = max(counts[1]) - min(counts[1])
                yardstick = max(0.05 * float(np.mean(counts[1])), spread, 1.0)
                _keep_worst(pairs, "steps", (more, yardstick))
        if pairs:
            found[mode] = pairs
    return found


def _keep_worst(pairs: dict, quantity: str, pair: tuple[float, float]) -> None:
    old = pairs.get(quantity)
    if old is None or pair[0] * max(old[1], 1e-300) > old[0] * max(pair[1], 1e-300):
        pairs[quantity] = pair
