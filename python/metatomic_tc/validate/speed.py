"""
The time of an MD step (energy, forces and virial) without the neighbor list, in boxes of water. The
modes take turns, and the median counts.
"""

import statistics
import time

import torch

from ..progress import Bar
from .structures import Structure, rounded

TEST = "speed"


def run(context) -> None:
    """Measure all sizes."""
    settings = context.settings
    for unit in context.structures(TEST, [settings.speed_structure]):
        for atoms in settings.speed_atoms:
            box = enlarged(unit, atoms)
            missing = [
                mode for mode in context.modes if context.results.get(TEST, mode, box.name) is None
            ]
            if missing:
                # fp32 again: times of one run are compared
                missing = ["fp32"] + [mode for mode in missing if mode != "fp32"]
                # TorchScript's optimizer takes seconds, and gains nothing where modes are emulated.
                with torch.jit.optimized_execution(context.device.type == "cuda"):
                    _measure(context, box, missing)


def _measure(context, box: Structure, modes: list[str]) -> None:
    steps, times = {}, {mode: [] for mode in modes}
    rounds = context.settings.speed_rounds
    bar = Bar(box.name, len(modes) * (rounds + 1))
    done = 0
    for mode in modes:
        with context.guard(TEST, mode, box.name):
            evaluator = context.evaluators(mode)
            step = evaluator.timed_step(evaluator.system(box))
            for _ in range(4 if context.device.type == "cuda" else 1):
                step()  # TorchScript specialises in its first runs
            steps[mode] = step
        done += 1
        bar(done)
    for _ in range(rounds):
        for mode in list(steps):
            step = steps[mode]
            with context.guard(TEST, mode, box.name):
                step()
                for _ in range(3):
                    _wait(context.device)
                    start = time.perf_counter()
                    step()
                    _wait(context.device)
                    times[mode].append(time.perf_counter() - start)
            done += 1
            bar(done)
    for mode in modes:
        if times[mode]:
            result = {"atoms": len(box.atoms), "ms": 1e3 * statistics.median(times[mode])}
            if times.get("fp32"):
                result["ratio"] = 1e3 * statistics.median(times["fp32"]) / result["ms"]
            context.results.put(TEST, mode, box.name, result)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def enlarged(structure: Structure, atoms: int) -> Structure:
    """
    A box of about as many atoms, made of copies.

    :param atoms: at least this many, if they are a multiple of those of ``structure``
    """
    copies = max(1, round(atoms / len(structure.atoms)))
    box = structure.atoms * repetitions(copies)
    return Structure(f"{structure.name}, {len(box)} atoms", rounded(box))


def repetitions(count: int) -> tuple[int, int, int]:
    """Three factors of ``count``, as equal as they can be."""
    factors = (
        (a, b, count // (a * b))
        for a in range(1, count + 1)
        if count % a == 0
        for b in range(a, count // a + 1)
        if (count // a) % b == 0 and count // (a * b) >= b
    )
    return min(factors, key=sum)


def quantities(context) -> dict[str, dict[str, tuple[float, float]]]:
    """For each mode, what the verdicts look at: value and yardstick by quantity."""
    if context.device.type != "cuda":
        return {}  # the modes are emulated there
    found: dict = {}
    for mode in context.modes:
        ratios = [r["ratio"] for r in context.results.of(TEST, mode).values() if "ratio" in r]
        if ratios:
            found[mode] = {"slowdown": (1 / max(ratios), 1.0)}
    return found
