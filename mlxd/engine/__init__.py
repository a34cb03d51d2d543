"""The engine process: the only place that computes with MLX."""
