"""A sparse matrix of tile pairs: its structure in both orders, and products with it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..lists import index_type, mirrored


@dataclass(eq=False)
class Pairs:
    """The pattern of a matrix with K entries.

    row_starts [rows + 1] int64 and cols [K]: entries row after row; col_starts [columns + 1] int64 and rows [K]: column
    after column, where entry e is entry to_columns[e] of the other order, of `index_type`.
    """

    row_starts: Tensor
    cols: Tensor
    col_starts: Tensor
    rows: Tensor
    to_columns: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.row_starts) - 1, len(self.col_starts) - 1

    @cached_property
    def mirrored(self) -> Pairs:
        """Of the transposed matrix."""
        entries = torch.arange(len(self.cols), dtype=self.to_columns.dtype, device=self.cols.device)
        to_rows = torch.empty_like(entries).scatter_(0, self.to_columns.long(), entries)
        return Pairs(self.col_starts, self.rows, self.row_starts, self.cols, to_rows)

    @cached_property
    def row_of_entries(self) -> Tensor:
        """[K] int32, in row order."""
        rows = torch.arange(self.shape[0], dtype=torch.int32, device=self.cols.device)
        return torch.repeat_interleave(rows, self.row_starts.diff(), output_size=len(self.cols))

    def matrix(self, values: Tensor) -> Tensor:
        """Of values [K] in row order."""
        return compressed_rows(self.row_starts, self.cols, values, self.shape[1])

    def transposed(self, values: Tensor) -> Tensor:
        """The transposed matrix of values [K] in row order."""
        return compressed_rows(self.col_starts, self.rows, values.index_select(0, self.to_columns), self.shape[0])


def pairs_of(rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> Pairs:
    """Of entries [K] without repeats that are in row order."""
    rows, cols = rows.to(torch.int32), cols.to(torch.int32)
    row_starts = torch.searchsorted(rows, torch.arange(shape[0] + 1, dtype=rows.dtype, device=rows.device))
    found = Pairs(row_starts, cols, *mirrored(row_starts, cols, shape[1]))
    found.row_of_entries = rows
    return found


def compressed_rows(starts: Tensor, cols: Tensor, values: Tensor, n_cols: int) -> Tensor:
    """A sparse matrix in compressed rows, for products with dense vectors and matrices."""
    index = index_type(len(values))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            starts.to(index), cols.to(index), values, (len(starts) - 1, n_cols), check_invariants=False
        )
