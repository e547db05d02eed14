"""Lists of tile pairs cut into items of equal work: long lists would leave most of a GPU waiting for a few programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

PROGRAMS = 8192  # several times what one GPU holds at once
CHUNK, LARGEST_CHUNKS = 32, 16  # tile pairs a program takes together; of those at most


@dataclass(eq=False)
class Items:
    """Lists cut into items of `pairs` tile pairs at most: starts [tiles + 1]; tile of each item, `tiles` if unused."""

    pairs: int
    starts: Tensor
    tiles: Tensor


def items_of(starts: Tensor, n_pairs: int) -> Items:
    """The items of lists of n_pairs in all: found once for each tensor of starts, which must not change. Their number
    is bounded, not read: the host does not wait."""
    items: Items | None = _items.get(starts)
    if items is None:
        items = _items[starts] = _items_of(starts, n_pairs)
    return items


def _items_of(starts: Tensor, n_pairs: int) -> Items:
    pairs = CHUNK * min(max(-(-n_pairs // (CHUNK * PROGRAMS)), 1), LARGEST_CHUNKS)
    tiles = starts.shape[0] - 1
    counts = (starts[1:] - starts[:-1] + (pairs - 1)) // pairs
    item_starts = torch.zeros_like(starts)
    torch.cumsum(counts, 0, out=item_starts[1:])
    item = torch.arange(tiles + n_pairs // pairs, device=starts.device)
    return Items(pairs, item_starts, torch.searchsorted(item_starts[1:], item, right=True))


_items = WeakTensorKeyDictionary()  # a mask's two live as long as the mask
