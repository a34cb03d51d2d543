"""One model's admission, daemon side: its waiting order, and the tickets of what was admitted."""

from mlxd.gateway.gateway import DRAIN_RETRY, ENGINE_RETRY, Gateway
from mlxd.gateway.inengine import ProtocolError

__all__ = ["DRAIN_RETRY", "ENGINE_RETRY", "Gateway", "ProtocolError"]
