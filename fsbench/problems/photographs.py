"""Colour transfer between two photographs: real, clustered data in three dimensions.

The photographs are scikit-learn's china.jpg (danielbuechele, Flickr) and flower.jpg (vultilion, Flickr), both under
CC BY 2.0; they come with the package, so nothing is downloaded.
"""

from __future__ import annotations

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.sampling import equal_weights


def photographs(*, n: int, m: int, d: int, eps: float, seed: int) -> Clouds:
    """n pixel colours of china onto m of flower, in [0, 1]^3, drawn without replacement; equal weights.

    ValueError if d is not 3, or if n or m is more than a photograph's 273,280 pixels.
    """
    from sklearn.datasets import load_sample_image  # here: slow to import, and only this family needs it

    if d != 3:
        raise ValueError(f"d must be 3 for photographs (red, green, blue), got {d}")
    rng = np.random.default_rng(seed)
    x, y = (
        _colours(rng, load_sample_image(f"{image}.jpg"), name, size)
        for image, name, size in (("china", "n", n), ("flower", "m", m))
    )
    return Clouds(x, y, equal_weights(n), equal_weights(m))


def _colours(rng: np.random.Generator, image: np.ndarray, name: str, size: int) -> np.ndarray:
    pixels = image.reshape(-1, 3)
    if size > len(pixels):
        raise ValueError(f"{name} must be at most the photograph's {len(pixels)} pixels, got {size}")
    return pixels[rng.choice(len(pixels), size, replace=False)] / 255
