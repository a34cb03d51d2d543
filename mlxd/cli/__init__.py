"""The `mlxd` command: the daemon, and thin clients of its admin API."""

from mlxd.cli.commands import main

__all__ = ["main"]
