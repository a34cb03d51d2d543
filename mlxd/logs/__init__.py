"""Where log lines go, how they look, and how often one may be written."""

from mlxd.logs.setup import configure

__all__ = ["configure"]
