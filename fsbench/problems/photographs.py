"""Colour transfer between two photographs: real, clustered data in three dimensions.

The photographs are scikit-learn's china.jpg (danielbuechele, Flickr) and flower.jpg (vultilion, Flickr), both under
CC BY 2.0; they come with the package, so nothing is downloaded.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import equal_weights

PIXELS = 273_280  # 427 x 640 in either


@checked()
def photographs(
    *,
    n: Annotated[int, Within(1, PIXELS)],
    m: Annotated[int, Within(1, PIXELS)],
    d: Annotated[int, Within(3, 3)],
    eps: float,
    seed: int,
) -> Clouds:
    """n pixel colours of china onto m of flower, in [0, 1]^3, drawn without replacement; equal weights.

    ValueError if d is not 3 (red, green, blue), or if n or m is more than a photograph has pixels.
    """
    from sklearn.datasets import load_sample_image  # here: slow to import, and only this family needs it

    rng = np.random.default_rng(seed)
    x, y = (_colours(rng, load_sample_image(f"{image}.jpg"), size) for image, size in (("china", n), ("flower", m)))
    return Clouds(x, y, equal_weights(n), equal_weights(m))


def _colours(rng: np.random.Generator, image: np.ndarray, size: int) -> np.ndarray:
    pixels = image.reshape(-1, 3)
    return pixels[rng.choice(len(pixels), size, replace=False)] / 255
