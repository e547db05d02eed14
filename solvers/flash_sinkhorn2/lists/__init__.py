"""Lists of tile pairs, row after row, and their mirror image."""

from .mirror import index_type, mirrored

__all__ = ["index_type", "mirrored"]
