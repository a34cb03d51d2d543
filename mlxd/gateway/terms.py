"""What a model's requests are served under."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from mlxd.config import BatchSettings, PolicySettings
from mlxd.policy import unbatchable
from mlxd.wire import BatchTuning, Capabilities, Pacing


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings that a gateway serves under; replaced whole by `retune`."""

    batch: BatchSettings
    policy: PolicySettings
    request_timeout: float  # seconds from admission

    @property
    def tuning(self) -> BatchTuning:
        """The part that the engine needs."""
        return BatchTuning(
            width=self.batch.width,
            prefill_chunk=self.batch.prefill_chunk,
            prefill_budget=self.batch.prefill_budget,
            prefix_cache=self.batch.prefix_cache,
            pacing=Pacing(self.batch.pacing),
        )


def tell_unbatchable(
    log: structlog.stdlib.BoundLogger, policy: PolicySettings, capabilities: Capabilities
) -> None:
    """Log what the policy would batch and this engine cannot: a warning where it was written."""
    traits = unbatchable(policy, capabilities)
    written = [trait for trait in traits if trait in policy.model_fields_set]
    default = [trait for trait in traits if trait not in policy.model_fields_set]
    if written:
        log.warning('policy says "batch", the engine cannot: serial', traits=written)
    if default:
        log.info("traits that this engine cannot batch go serial", traits=default)
