"""Every op family, imported for its declarations."""

from . import elementwise

__all__ = ["elementwise"]
