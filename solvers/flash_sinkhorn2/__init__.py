"""FlashSinkhorn2: multiscale, block-sparse entropic OT for points of low dimension."""
