"""Evidence that a mode keeps the physics of a model: ``metatomic-tc validate``."""

from .driver import validate

__all__ = ["validate"]
