"""One model's life: its files, its tokenizer, its engine process, its gateway."""

from mlxd.host.host import Host

__all__ = ["Host"]
