"""One kd tree a cloud: its tiles, the boxes of the screen, the cells of the coarse correction, the cascade's levels."""

from .clouds import TiledCloud, from_tiles, tiled_clouds, to_tiles
from .nodes import node_clouds, node_variance
from .tree import Tree, kd_tree

__all__ = ["TiledCloud", "Tree", "from_tiles", "kd_tree", "node_clouds", "node_variance", "tiled_clouds", "to_tiles"]
