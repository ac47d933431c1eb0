"""
The total energy in a run at constant energy, in LAMMPS through the pair style.

All modes start from the same positions and velocities, and run side by side. The drift is the slope
of a straight line through the means of blocks of equal length, and its uncertainty the standard
error of that slope: the means of long blocks scatter independently of each other, unlike the
energies of successive steps.
"""

import contextlib
import functools
import math
import os
import sys

import numpy as np

from ..progress import Bar
from . import lammps

TEST = "conservation"
BLOCKS = 10
#: Points in the report; longer runs are thinned out for it, and analysed as a whole
MOST_POINTS = 1500
SEED = 20261


def run(context) -> None:
    """Run LAMMPS in all modes. What an interrupted run has done is analysed, and can be resumed."""
    length = context.settings.nve_picoseconds
    for structure in context.structures(TEST, [context.settings.nve_structure]):
        starts = {
            (mode, structure.name): functools.partial(_Dynamics, context, structure, mode)
            for mode in context.modes
            if not _finished(context, context.results.get(TEST, mode, structure.name))
        }
        running: dict[tuple[str, str], _Dynamics] = {}
        bar = Bar("picoseconds of all modes", length * len(starts))

        def show(ended: int, bar=bar, running=running) -> None:
            bar(length * ended + sum(dynamics.progress() for dynamics in running.values()))

        try:
            context.side_by_side(TEST, starts, running, show)
        except BaseException:
            _keep(context, running)
            raise


def _finished(context, result: dict | None) -> bool:
    timestep = 1e-3 * context.settings.nve_timestep
    return (
        result is not None and result["picoseconds"] > context.settings.nve_picoseconds - timestep
    )


def _keep(context, running: dict[tuple[str, str], "_Dynamics"]) -> None:
    """End the runs, and put what they have in common in time into the report."""
    for dynamics in running.values():
        dynamics.stop()
    shortest = min((dynamics.progress() for dynamics in running.values()), default=0.0)
    for name, dynamics in running.items():
        with contextlib.suppress(ValueError, ArithmeticError):  # too short, or not finite
            context.results.put(TEST, *name, dynamics.until(shortest))


class _Dynamics(lammps.Run):
    """The run of one mode; continues the last one if that left a restart file."""

    def __init__(self, context, structure, mode: str):
        settings = context.settings
        actual = context.evaluators.mode_of(mode)
        if actual is None:
            raise ValueError(f"'{mode}' is not a mode of the pair style")
        self._directory = (
            context.directory / "work" / lammps.safe_name(f"nve-{structure.name}-{mode}")
        )
        self._atoms = len(structure.atoms)
        self._timestep = 1e-3 * settings.nve_timestep
        steps = round(settings.nve_picoseconds / self._timestep)
        self._steps = max(steps, 1)
        every = min(settings.nve_every, self._steps)
        # A run begun with other settings is of no use.
        parts = lammps.setup(
            structure, f"{actual} {context.pair_options}", context.model, self._directory
        )
        identity = repr((parts, context.results.data.get("model_sha256"), settings.nve_timestep))
        identity += repr(
            (settings.nve_temperature, every, (self._directory / "start.data").read_text())
        )
        mark = self._directory / "identity"
        if not context.resume or not mark.exists() or mark.read_text() != identity:
            for path in self._directory.glob("nve*"):
                path.unlink()
            mark.write_text(identity)
        restarts = sorted(self._directory.glob("nve.restart.*"), key=os.path.getmtime)
        # The last one may have been interrupted while it was written.
        complete = [path for path in restarts if path.stat().st_size == restarts[0].stat().st_size]
        number = len(list(self._directory.glob("nve-*.log")))
        if complete:
            start = f"read_restart {complete[-1].name}\n"
            velocities = ""
            print(f"  {mode}: continued from {complete[-1].name}", file=sys.stderr)
        else:
            start = f"{parts['before']}read_data start.data\n"
            velocities = (
                f"velocity all create {settings.nve_temperature} {SEED} mom yes rot no "
                "dist gaussian\n"
            )
        often = max(50, min(1000, self._steps // 20))
        script = (
            f"{start}{parts['pair']}{velocities}timestep {self._timestep}\nfix 1 all nve\n"
            f"thermo_style custom step temp etotal\nthermo_modify format float %.12g flush yes\n"
            f"thermo {every}\nrestart {often} nve.restart.a nve.restart.b\nrun {self._steps} upto\n"
        )
        super().__init__(script, self._directory, f"nve-{number}")

    def progress(self) -> float:
        """Picoseconds that are done."""
        steps = lammps.read_log(self.log).get("Step", [])
        return steps[-1] * self._timestep if steps else 0.0

    def result(self) -> dict:
        """
        What :meth:`until` finds in the whole run.

        :raises RuntimeError: if LAMMPS failed
        """
        self.check()
        return self.until(math.inf)

    def until(self, end: float) -> dict:
        """
        The energies of all parts of the run, later ones in place of earlier ones, analysed.

        :param end: leaves out what comes later, in ps
        """
        energies: dict[int, tuple[float, float]] = {}
        logs = self._directory.glob("nve-*.log")
        for path in sorted(logs, key=lambda path: int(path.stem.removeprefix("nve-"))):
            log = lammps.read_log(path)
            rows = zip(*(log.get(name, []) for name in ("Step", "TotEng", "Temp")), strict=True)
            energies |= {int(step): (energy, temperature) for step, energy, temperature in rows}
        steps = sorted(step for step in energies if step * self._timestep <= end)
        times = np.array(steps) * self._timestep
        change = np.array([energies[step][0] for step in steps])
        if not steps:
            raise ValueError("the run has not begun")
        change = 1000 * (change - change[0]) / self._atoms
        temperature = float(np.mean([energies[step][1] for step in steps]))
        thin = slice(None, None, math.ceil(len(times) / MOST_POINTS))
        return analyse(times, change) | {
            "atoms": self._atoms,
            "picoseconds": float(times[-1]),
            "temperature": temperature,
            "times": [round(value, 6) for value in times[thin].tolist()],
            "changes": [round(value, 6) for value in change[thin].tolist()],
        }


def analyse(times, change) -> dict:
    """
    Drift, its uncertainty and the fluctuation about it.

    :param times: in ps, equally spaced
    :param change: of the total energy, in meV per atom
    :return: ``drift`` and ``drift_uncertainty`` in meV/atom/ps, ``fluctuation`` (RMS about
        the line) and ``largest`` (change since the start) in meV per atom
    """
    times, change = np.asarray(times, dtype=float), np.asarray(change, dtype=float)
    if not np.isfinite(change).all():
        raise ArithmeticError("the total energy is not finite")
    blocks = min(BLOCKS, len(times))
    if blocks < 4:
        raise ValueError(f"{len(times)} energies are too few for a drift")
    # what does not fit into equal blocks is left out at the start
    length = len(times) // blocks
    tail = slice(len(times) - blocks * length, None)
    block_times = times[tail].reshape(blocks, length).mean(axis=1)
    means = change[tail].reshape(blocks, length).mean(axis=1)
    centred = block_times - block_times.mean()
    slope = float(centred @ means / (centred @ centred))
    left = means - means.mean() - slope * centred
    uncertainty = float(np.sqrt(left @ left / (blocks - 2) / (centred @ centred)))
    about = change - means.mean() - slope * (times - block_times.mean())
    return {
        "drift": slope,
        "drift_uncertainty": uncertainty,
        "fluctuation": float(np.sqrt(np.mean(about**2))),
        "largest": float(np.abs(change).max()),
        "blocks": blocks,
    }


def quantities(context) -> dict[str, dict[str, tuple[float, float]]]:
    """For each mode, what the verdicts look at: value and yardstick by quantity."""
    found: dict = {}
    for mode in context.modes:
        pairs: dict = {}
        for structure, result in context.results.of(TEST, mode).items():
            fp32 = context.results.get(TEST, "fp32", structure)
            # Of two lengths one has had more time to drift.
            if fp32 is None or result.get("picoseconds") != fp32.get("picoseconds"):
                continue
            both = math.hypot(result["drift_uncertainty"], fp32["drift_uncertainty"])
            # A drift below FP32's own is no loss.
            more = max(0.0, abs(result["drift"]) - abs(fp32["drift"]))
            pairs["drift"] = (more, both)
            pairs["fluctuation"] = (result["fluctuation"], fp32["fluctuation"])
            pairs["largest"] = (result["largest"], fp32["largest"])
        if pairs:
            found[mode] = pairs
    return found
