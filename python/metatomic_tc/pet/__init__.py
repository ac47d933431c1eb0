"""
PET on flat rows: one row for each edge, without padding. See docs/pet_backend.md.

Throughout, N is the number of atoms and E that of edges; edges lie in rows by their centre, those
of atom ``i`` being ``row_starts[i]`` to ``row_starts[i + 1]``. Indices are int32.
"""

from .replace import backend_of, replace_backend
from .step import Step

__all__ = ["Step", "backend_of", "replace_backend"]
