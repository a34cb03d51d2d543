"""One model's admission, daemon side: its waiting order, and the tickets of what was admitted."""

from mlxd.gateway.gateway import DRAIN_RETRY, Gateway, ProtocolError

__all__ = ["DRAIN_RETRY", "Gateway", "ProtocolError"]
