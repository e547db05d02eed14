"""Names of the update schemes that fixed-iteration solvers declare, so that tests can hold them to a reference."""

from __future__ import annotations

from enum import StrEnum


class Scheme(StrEnum):
    """Order of the half-steps of one iteration, and the starting point, in the common convention.

    F <- -eps log sum_j b_j exp((g_j - C_ij) / eps) and G likewise, without any averaging unless stated.
    """

    ROWS_FIRST = "rows_first"  # g = 0, then F, G, F, G, ...
    COLUMNS_FIRST_UNWEIGHTED = "columns_first_unweighted"  # f = -eps log a, then G, F, G, F, ...
    SYMMETRIC = "symmetric"  # f = g = 0; first and last sweep F and G at once, those between averaged with the old ones
