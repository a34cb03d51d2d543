"""mlxd: a daemon that serves language models with MLX and mlx-lm."""

__version__ = "0.1.0"
