"""The mask of small clouds: every tile pair."""

from __future__ import annotations

import torch

from ..geometry import TiledCloud
from ..lists import index_type
from .mask import Mask


def every_pair(x: TiledCloud, y: TiledCloud) -> Mask:
    """All tile pairs of both clouds; nothing is left out at any potentials."""
    rows, cols = x.tree.tiles, y.tree.tiles
    i, j = torch.arange(rows, device=x.mass.device), torch.arange(cols, device=x.mass.device)
    return Mask(
        torch.arange(rows + 1, device=i.device) * cols,
        j.repeat(rows).int(),
        torch.arange(cols + 1, device=i.device) * rows,
        i.repeat(cols).int(),
        (i * cols + j[:, None]).flatten().to(index_type(rows * cols)),
        torch.zeros_like(x.mass),
        torch.zeros_like(y.mass),
    )
