"""
The product of FP32 matrices by Triton's ``tf32x3``: what a user of Triton gets for little work.

Importing this needs Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """What a program of the kernel computes, and with how many warps and pipeline stages."""

    rows: int
    columns: int
    k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.k}, {self.warps} warps, {self.stages} stages"


TILES = [
    Tile(128, 128, 32, 8, 3),
    Tile(128, 64, 32, 4, 3),
    Tile(64, 128, 32, 4, 3),
    Tile(128, 128, 16, 8, 4),
    Tile(64, 64, 32, 4, 4),
    Tile(32, 64, 64, 4, 3),
]


@triton.jit
def _kernel(
    a_pointer,
    w_pointer,
    c_pointer,
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # programs in a row share the rows of A
    tiles_n = tl.cdiv(N, TILE_N)
    m = (tl.program_id(0) // tiles_n) * TILE_M + tl.arange(0, TILE_M)
    n = (tl.program_id(0) % tiles_n) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    a_pointers = a_pointer + m[:, None].to(tl.int64) * K + k[None, :]
    if TRANSPOSED:
        w_pointers = w_pointer + n[None, :] * K + k[:, None]
        w_step = TILE_K
    else:
        w_pointers = w_pointer + k[:, None] * N + n[None, :]
        w_step = TILE_K * N
    accumulator = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        if WHOLE_TILES:
            a = tl.load(a_pointers, mask=m[:, None] < M, other=0.0)
            w = tl.load(w_pointers)
        else:
            inside = start + k < K
            a = tl.load(a_pointers, mask=(m[:, None] < M) & inside[None, :], other=0.0)
            w = tl.load(w_pointers, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        accumulator = tl.dot(a, w, accumulator, input_precision="tf32x3")
        a_pointers += TILE_K
        w_pointers += w_step
    c_pointers = c_pointer + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c_pointers, accumulator, mask=(m[:, None] < M) & (n[None, :] < N))


def product(a: torch.Tensor, w: torch.Tensor, transposed: bool, tile: Tile) -> torch.Tensor:
    """
    ``a · wᵀ`` if ``transposed``, else ``a · w``.

    :param a: ``[M, K]``, FP32, contiguous, on a GPU
    :param w: ``[N, K]`` if ``transposed``, else ``[K, N]``
    """
    (M, K), N = a.shape, w.shape[0 if transposed else 1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    _kernel[(triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns),)](
        a,
        w,
        c,
        M,
        N,
        K,
        transposed,
        K % tile.k == 0 and N % tile.columns == 0,
        tile.rows,
        tile.columns,
        tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return c


def fastest_tile(a: torch.Tensor, w: torch.Tensor, transposed: bool) -> Tile:
    """
    The tile of ``TILES`` that takes the shortest time on these matrices.

    :raises RuntimeError: if none can be compiled or run
    """
    times, failure = {}, None
    for tile in TILES:
        try:
            product(a, w, transposed, tile)
            times[tile] = min(_time(a, w, transposed, tile) for _ in range(3))
        except Exception as error:  # e.g. more shared memory than the GPU has
            failure = error
    if not times:
        raise RuntimeError(f"no tile can be used: {failure}") from failure
    return min(times, key=times.get)


def _time(a: torch.Tensor, w: torch.Tensor, transposed: bool, tile: Tile) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # the GPU waits until everything is launched
    start.record()
    for _ in range(3):
        product(a, w, transposed, tile)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
