"""Between pairs and PET's edges: reverse edges, and the cutoffs of the method "grid"."""

import math

import torch
from torch import Tensor


def reverse_edges(
    neighbors: Tensor, cell_shifts: Tensor, row_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """
    The index of the edge (j, i, -shift) for every edge (i, j, shift).

    :return: the indices ``[E]``, and how many there were none for ``[1]``
    """
    reverse = torch.ops.metatomic_tc.pet_reverse_edges(neighbors, cell_shifts, row_starts)
    return reverse.clamp_min(0), (reverse < 0).sum(dim=0, keepdim=True)


def expect_all_reverses(missing: int) -> None:
    """:raises RuntimeError: if ``missing`` is not 0"""
    if missing > 0:
        raise RuntimeError(
            f"PET needs a full neighbor list that holds every pair of atoms in both directions, "
            f"but for {missing} of its pairs (i, j, shift) the list has no pair (j, i, -shift); "
            "this is an error of the engine that made the list"
        )


def grid_cutoffs(
    vectors: Tensor,
    row_starts: Tensor,
    num_neighbors: float,
    max_cutoff: float,
    width: float,
) -> Tensor:
    """
    Cutoffs by metatrain's method "grid": the mean of a grid of cutoffs, weighted by how close the
    number of neighbors within each comes to the wanted one.

    :param vectors: ``[P, 3]``, those of all pairs, in the length unit of the model
    :param num_neighbors: wanted number of neighbors
    :param max_cutoff: end of the grid, exclusive
    :param width: width of the function that counts the neighbors
    :return: ``[N]``, differentiable
    """
    distances = torch.linalg.vector_norm(vectors, dim=1) + 1e-15
    grid = torch.arange(
        0.5, max_cutoff, width / 4.0, dtype=distances.dtype, device=distances.device
    )
    scaled = ((distances[:, None] - grid + width) / width).clamp(1e-6, 1.0 - 1e-6)
    inside = 0.5 * (1.0 + torch.tanh(1.0 / torch.tan(math.pi * scaled)))
    counts = torch.ops.metatomic_tc.pet_segment_sum(inside, torch.ones_like(distances), row_starts)
    # A density of atoms that does not depend on the surroundings makes the count grow everywhere.
    position = torch.linspace(0, 1, len(grid), dtype=grid.dtype, device=grid.device)
    excess = counts - num_neighbors + num_neighbors * position**3
    if len(grid) == 1:
        slope = 0.5 * excess.abs() + 1e-12
    else:
        slope = torch.gradient(excess, dim=-1)[0].abs().clamp_min(1e-12)
    return torch.softmax(-0.5 * (excess / slope) ** 2, dim=1) @ grid
