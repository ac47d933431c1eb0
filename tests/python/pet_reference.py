"""
The operators of the PET backend in plain PyTorch: what they compute, slow and differentiable.

Names and arguments are those of ``torch.ops.metatomic_tc``. Pairs and edges lie in rows by centre:
those of atom ``i`` are ``row_starts[i]`` to ``row_starts[i + 1]``. Indices are int32.
"""

import math

import torch
from torch import Tensor

#: added to distances, and the smallest weight of a token in an attention
TINY = 1e-15


def centers(row_starts: Tensor) -> Tensor:
    """The centre of each pair or edge, int64."""
    atoms = torch.arange(len(row_starts) - 1, device=row_starts.device)
    return atoms.repeat_interleave(row_starts.diff().long())


def row_sums(values: Tensor, row_starts: Tensor) -> Tensor:
    """``[E, ...]`` to ``[N, ...]``."""
    zeros = values.new_zeros((len(row_starts) - 1, *values.shape[1:]))
    return zeros.index_add(0, centers(row_starts), values)


def bump(distances: Tensor, cutoffs: Tensor, width: float) -> Tensor:
    s = ((distances - cutoffs + width) / width).clamp(1e-6, 1 - 1e-6)
    return 0.5 * (1 + torch.tanh(1 / torch.tan(math.pi * s)))


def cosine(distances: Tensor, cutoffs: Tensor, width: float) -> Tensor:
    s = ((distances - cutoffs + width) / width).clamp(0, 1)
    return 0.5 * (1 + torch.cos(math.pi * s))


def pet_edge_vectors(
    positions: Tensor,
    cells: Tensor,
    neighbors: Tensor,
    cell_shifts: Tensor,
    row_starts: Tensor,
    reverse: Tensor,
    system_indices: Tensor,
) -> Tensor:
    i, j = centers(row_starts), neighbors.long()
    images = torch.einsum(
        "es,esx->ex", cell_shifts.to(cells.dtype), cells[system_indices.long()[i]]
    )
    return positions[j] - positions[i] + images


def pet_adaptive_cutoffs(
    positions: Tensor,
    cells: Tensor,
    neighbors: Tensor,
    cell_shifts: Tensor,
    row_starts: Tensor,
    system_indices: Tensor,
    num_neighbors: float,
    max_cutoff: float,
    width: float,
) -> Tensor:
    vectors = pet_edge_vectors(
        positions, cells, neighbors, cell_shifts, row_starts, neighbors, system_indices
    )
    d = vectors.norm(dim=1) + TINY
    i = centers(row_starts)

    def excess(r: Tensor, d: Tensor) -> Tensor:
        count = row_sums(bump(d, r[i], width), row_starts)
        return count + num_neighbors * (r / max_cutoff) ** 3 - num_neighbors

    def newton(r: Tensor) -> tuple[Tensor, Tensor]:
        """The excess and its slope, at least 1e-6; no gradients."""
        s = (d.detach() - r[i] + width) / width
        active = (s > 0) & (s < 1)
        angle = math.pi * s.clamp(1e-6, 1 - 1e-6)
        t = torch.tanh(torch.cos(angle) / torch.sin(angle))
        weights = torch.where(active, 0.5 * (1 + t), (s <= 0).to(s.dtype))
        slopes = 0.5 * math.pi / width * (1 - t * t) / torch.sin(angle) ** 2 * active
        count, slope = row_sums(weights, row_starts), row_sums(slopes, row_starts)
        count = count + num_neighbors * (r / max_cutoff) ** 3
        slope = slope + 3 * num_neighbors * (r / max_cutoff) ** 2 / max_cutoff
        return count - num_neighbors, slope.clamp_min(1e-6)

    low = positions.new_zeros(len(positions))
    high = torch.full_like(low, max_cutoff)
    r = 0.5 * high
    for _ in range(10):
        f, slope = newton(r)
        low, high = torch.where(f <= 0, r, low), torch.where(f <= 0, high, r)
        step = r - f / slope
        r = torch.where((step >= low) & (step <= high), step, 0.5 * (low + high))
    return (r - excess(r, d) / newton(r)[1]).clamp(max_cutoff / 16, max_cutoff)


def pet_select_edges(
    positions: Tensor,
    cells: Tensor,
    neighbors: Tensor,
    cell_shifts: Tensor,
    row_starts: Tensor,
    system_indices: Tensor,
    atomic_cutoffs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, j = centers(row_starts), neighbors.long()
    vectors = pet_edge_vectors(
        positions, cells, neighbors, cell_shifts, row_starts, neighbors, system_indices
    )
    kept = vectors.detach().norm(dim=1) + TINY <= (atomic_cutoffs[i] + atomic_cutoffs[j]) / 2
    counts = row_sums(kept.int(), row_starts)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
    return neighbors[kept], cell_shifts[kept], starts, starts[-1:]


def pet_reverse_edges(neighbors: Tensor, cell_shifts: Tensor, row_starts: Tensor) -> Tensor:
    edges = list(
        zip(
            centers(row_starts).tolist(),
            neighbors.tolist(),
            map(tuple, cell_shifts.tolist()),
            strict=True,
        )
    )
    index = {edge: e for e, edge in enumerate(edges)}
    reverse = [index.get((j, i, tuple(-s for s in shift)), -1) for i, j, shift in edges]
    return torch.tensor(reverse, dtype=torch.int32, device=neighbors.device)


def pet_cutoff_factors(
    vectors: Tensor,
    atomic_cutoffs: Tensor,
    neighbors: Tensor,
    row_starts: Tensor,
    reverse: Tensor,
    width: float,
    bump: bool,
) -> Tensor:
    cutoffs = (atomic_cutoffs[centers(row_starts)] + atomic_cutoffs[neighbors.long()]) / 2
    function = globals()["bump"] if bump else cosine
    return function(vectors.norm(dim=1) + TINY, cutoffs, width)


def pet_edge_tokens(
    messages: Tensor | None,
    vectors: Tensor,
    geometry_weight: Tensor,
    neighbor_table: Tensor,
    neighbor_species: Tensor,
) -> Tensor:
    distances = torch.sqrt((vectors**2).sum(1, keepdim=True) + TINY)
    x = torch.cat([vectors, distances], 1) @ geometry_weight.T
    x = x + neighbor_table[neighbor_species.long()]
    return torch.nn.functional.silu(x if messages is None else messages + x)


def pet_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, layer_norm: bool
) -> Tensor:
    if layer_norm:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon)
    return x * torch.rsqrt((x**2).mean(1, keepdim=True) + epsilon) * weight


def pet_concatenated_norm(
    nodes: Tensor,
    edges: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    layer_norm: bool,
) -> tuple[Tensor, Tensor]:
    return pet_norm(torch.cat([nodes, edges]), weight, bias, epsilon, layer_norm), edges


def pet_residual_norm(
    tokens: Tensor,
    edges: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    layer_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_atoms = len(tokens) - len(edges)
    sums = edges + tokens[num_atoms:]
    return tokens[:num_atoms].clone(), sums, pet_norm(sums, weight, bias, epsilon, layer_norm)


def pet_reversed_pair_norm(
    x: Tensor, reverse: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    return pet_norm(torch.cat([x, x[reverse.long()]], 1), weight, bias, epsilon, True), x


def pet_attention(
    qkv: Tensor, cutoff_factors: Tensor, row_starts: Tensor, num_heads: int, scale: float
) -> Tensor:
    num_atoms, dim = len(row_starts) - 1, qkv.shape[1] // 3
    tokens = qkv.reshape(len(qkv), 3, num_heads, dim // num_heads)
    starts = row_starts.tolist()
    nodes, edges = [qkv[:0, :dim]], [qkv[:0, :dim]]
    for i in range(num_atoms):
        own = torch.arange(starts[i], starts[i + 1], device=qkv.device)
        rows = torch.cat([own.new_tensor([i]), num_atoms + own])
        q, k, v = tokens[rows].permute(1, 2, 0, 3)
        c = torch.cat([cutoff_factors.new_ones(1), cutoff_factors[own]])
        scores = scale * q @ k.transpose(1, 2) + torch.log(c.clamp_min(TINY))
        result = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(rows), dim)
        nodes.append(result[:1])
        edges.append(result[1:])
    return torch.cat(nodes + edges)


def pet_segment_sum(values: Tensor, factors: Tensor, row_starts: Tensor) -> Tensor:
    return row_sums(values * factors[:, None], row_starts)


def pet_average_reversed(x: Tensor, y: Tensor, reverse: Tensor) -> Tensor:
    return 0.5 * (x + y[reverse.long()])


def pet_sum(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x + y + z
