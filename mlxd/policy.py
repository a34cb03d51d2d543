"""Which lane a request takes, and why. Pure functions over frozen values.

Traits and their order are those of SPEC 1; the most restrictive answer wins and
of several equal ones the first trait in `TRAITS` is the reason.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from mlxd.config import PolicySettings
from mlxd.wire import Capabilities, Lane, Sampling

#: Traits of a request, then of its model, in the order in which they give the reason.
TRAITS = (
    "seed",
    "logprobs",
    "penalties",
    "logit_bias",
    "structured",
    "adapter",
    "images",
    "kv_quant",
    "draft",
)

REASON_NONE = "none"
REASON_WIDTH = "width"


@dataclass(frozen=True, slots=True)
class Take:
    """The request runs in this lane, for this reason."""

    lane: Lane
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The policy refuses the request because of this trait."""

    trait: str


def request_traits(
    sampling: Sampling,
    *,
    seed_set: bool,
    adapter: bool = False,
    images: bool = False,
) -> frozenset[str]:
    """Traits of one request. A value that changes nothing carries no trait.

    Args:
        sampling: resolved parameters; its seed is always a number, so that
            `seed_set` says whether the client chose it.
    """
    found = {
        "seed": seed_set,
        "logprobs": sampling.logprobs is not None,
        "penalties": (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        ),
        "logit_bias": any(bias != 0 for bias in sampling.logit_bias.values()),
        "structured": sampling.grammar is not None,
        "adapter": adapter,
        "images": images,
    }
    return frozenset(trait for trait, present in found.items() if present)


def model_traits(capabilities: Capabilities) -> frozenset[str]:
    """Traits that a model gives to all its requests."""
    return frozenset({"kv_quant"} if capabilities.kv_bits else ())


def decide(
    traits: Set[str], policy: PolicySettings, width: int, capabilities: Capabilities
) -> Take | Reject:
    """The lane of a request with these traits (the model's own included).

    A trait that the policy would batch and the engine cannot goes serial with
    that trait as reason. Width 1 and an unbatchable cache class force the
    serial lane, whatever the traits say.
    """
    ordered = [trait for trait in TRAITS if trait in traits]
    answers = {trait: getattr(policy, trait) for trait in ordered}
    for trait in ordered:
        if answers[trait] == "reject":
            return Reject(trait)
    for trait in ordered:
        if answers[trait] == "serial" or trait not in capabilities.batchable:
            return Take(Lane.SERIAL, trait)
    if width == 1:
        return Take(Lane.SERIAL, REASON_WIDTH)
    if capabilities.serial_only is not None:
        return Take(Lane.SERIAL, capabilities.serial_only)
    return Take(Lane.BATCH, REASON_NONE)


def unbatchable(policy: PolicySettings, capabilities: Capabilities) -> list[str]:
    """Traits that the policy sends to the batch and this engine cannot take there."""
    return [
        trait
        for trait in TRAITS
        if getattr(policy, trait) == "batch" and trait not in capabilities.batchable
    ]
