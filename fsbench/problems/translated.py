"""A cloud and its translated copy: the debiased divergence is |t|^2 exactly, for every eps."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import uneven_weights


def _copy(*, n: int, m: int, **_: object) -> None:
    if m != n:
        raise ValueError(f"m must equal n for translated (a copy has as many points), got n={n}, m={m}")


@checked(_copy)
def translated(
    *, n: int, m: int, d: int, eps: float, seed: int, shift: Annotated[float, Within(-1e6, 1e6)] = 1.0
) -> Clouds:
    """x ~ N(0, I_d), y = x + t with |t| = shift along the diagonal, the same uneven weights on both sides.

    OT_eps itself has no closed form here, only OT_eps(x, y) - OT_eps(x, x) = |t|^2. ValueError if m is not n or
    shift is out of its range.
    """
    rng = np.random.default_rng(seed)
    x, weights = rng.standard_normal((n, d)), uneven_weights(rng, n)
    return Clouds(x, x + shift / np.sqrt(d), weights, weights.copy())
