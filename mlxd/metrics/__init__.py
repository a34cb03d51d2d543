"""Every metric, declared once on a registry that is passed in."""

from mlxd.metrics.registry import NO_LANE, Metrics

__all__ = ["NO_LANE", "Metrics"]
