"""Evaluates metatomic models for tests."""

import warnings

import numpy as np
import torch


def energy_and_forces(
    model, atoms, extensions=None, optimize: bool = False
) -> tuple[float, np.ndarray]:
    """
    Energy (eV) and forces (eV/Å) by ASE's metatomic calculator, on the CPU.

    :param model: a model, or the path of one
    :param optimize: let TorchScript optimize the model, which takes several seconds for each
    """
    from metatomic_ase import MetatomicCalculator

    with warnings.catch_warnings(), torch.jit.optimized_execution(optimize):
        warnings.simplefilter("ignore")
        atoms = atoms.copy()
        atoms.calc = MetatomicCalculator(
            model, device="cpu", extensions_directory=extensions, check_consistency=True
        )
        return atoms.get_potential_energy(), atoms.get_forces()


def largest_difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max())
