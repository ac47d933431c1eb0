"""Which products are measured."""

from dataclasses import dataclass

from .. import modes
from .pet_layers import LINEAR_LAYERS, rows_per_atom

#: forward is C = A·Wᵀ with W [N, K]; input_gradient is C = A·W with W [K, N], where A is the
#: gradient of the layer's output and W the same weight
DIRECTIONS = ["forward", "input_gradient"]


@dataclass
class Case:
    """The product of an M x K by a K x N matrix, for a layer's output or its input's gradient."""

    M: int
    N: int
    K: int
    direction: str
    #: number of atoms of the sizes of PET in ``models``; None and empty for shapes of the user
    atoms: int | None
    models: list[str]

    @property
    def weight_shape(self) -> tuple[int, int]:
        """``[out_features, in_features]`` of the layer."""
        return (self.N, self.K) if self.direction == "forward" else (self.K, self.N)

    @property
    def operations(self) -> int:
        """Floating-point operations of the product in FP32."""
        return 2 * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """Size of the three matrices in FP32."""
        return 4 * (self.M * self.K + self.N * self.K + self.M * self.N)

    def __str__(self) -> str:
        return f"{self.direction} {self.M} x {self.N} x {self.K}"


def pet_cases(sizes: list[str], atoms: list[int], directions: list[str]) -> list[Case]:
    """
    The distinct products of PET's layers, without those that compute in FP32 in every mode.

    :param sizes: keys of ``LINEAR_LAYERS``
    :param atoms: numbers of atoms of water
    :param directions: of ``DIRECTIONS``
    """
    smallest = modes.build_info()["minimum_features"]
    found: dict[tuple, Case] = {}
    for n_atoms in atoms:
        for size in sizes:
            for direction in directions:
                for layer in LINEAR_LAYERS[size]:
                    M = n_atoms * rows_per_atom(size, layer)
                    N, K = layer.out_features, layer.in_features
                    if min(N, K) < smallest:
                        continue
                    if direction == "input_gradient":
                        N, K = K, N
                    key = (n_atoms, direction, M, N, K)
                    case = found.setdefault(key, Case(M, N, K, direction, n_atoms, []))
                    if size not in case.models:
                        case.models.append(size)
    return list(found.values())


def shape_cases(shapes: list[tuple[int, int, int]], directions: list[str]) -> list[Case]:
    """Products of given (M, N, K)."""
    return [Case(*shape, direction, None, []) for shape in shapes for direction in directions]
