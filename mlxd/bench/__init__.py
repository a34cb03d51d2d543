"""The benchmark: mlxd and mlx-lm's own server side by side, as their clients see them."""

from mlxd.bench.command import main

__all__ = ["main"]
