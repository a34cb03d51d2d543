"""The memory budget: what all models' weights, work and KV may take together, and who gets what."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mlxd.wire import Ready

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Needs:
    """What one engine takes, in bytes."""

    weights: int
    working: int  # at the peak of a step or a chunk of prefill
    kv: int | None  # what its configuration grants for KV; None = a share


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that is loaded."""

    needs: Needs
    device: int  # what its device can give
    allow: Callable[[int], None]  # tells it how much KV it may hold


class MemoryBudget:
    """Splits the budget among the engines that are loaded, anew whenever that changes.

    Args:
        configured: bytes; None = what the engines' device can give.
    """

    def __init__(self, configured: int | None) -> None:
        self._configured = configured
        self._members: dict[Hashable, Member] = {}

    def join(
        self, key: Hashable, ready: Ready, kv: int | None, allow: Callable[[int], None]
    ) -> None:
        """An engine is loaded: it and the others get their shares.

        Args:
            kv: what its configuration grants; None = a share.
        """
        needs = Needs(ready.weight_bytes, ready.working_bytes, kv)
        self._members[key] = Member(needs, ready.device_bytes, allow)
        self._share_out()

    def grant(self, key: Hashable, kv: int | None) -> None:
        """The configuration grants an engine another amount, if it ever joined."""
        member = self._members.get(key)
        if member is not None and member.needs.kv != kv:
            self._members[key] = replace(member, needs=replace(member.needs, kv=kv))
            self._share_out()

    def leave(self, key: Hashable) -> None:
        """An engine is gone, if it ever joined: the others get what it had."""
        if self._members.pop(key, None) is not None:
            self._share_out()

    def resize(self, configured: int | None) -> None:
        """The configuration has changed."""
        self._configured = configured
        self._share_out()

    @property
    def free(self) -> int | None:
        """Bytes that weights and work leave for KV; None while nothing is known of the device."""
        if (budget := self._budget()) is None:
            return None
        return budget - sum(m.needs.weights + m.needs.working for m in self._members.values())

    def _budget(self) -> int | None:
        if self._configured is not None:
            return self._configured
        return min((member.device for member in self._members.values()), default=None)

    def _share_out(self) -> None:
        if (budget := self._budget()) is None:
            return
        needs = {key: member.needs for key, member in self._members.items()}
        for key, kv_bytes in shares(budget, needs).items():
            self._members[key].allow(kv_bytes)


def shares(budget: int, needs: Mapping[Key, Needs]) -> dict[Key, int]:
    """Bytes of KV for each engine: what weights and work leave, in equal parts.

    A grant of the configuration is taken off first, as far as there is as much.
    """
    left = max(0, budget - sum(each.weights + each.working for each in needs.values()))
    given: dict[Key, int] = {}
    for key, each in needs.items():
        if each.kv is not None:
            given[key] = min(each.kv, left)
            left -= given[key]
    sharing = [key for key in needs if key not in given]
    return given | {key: left // len(sharing) for key in sharing}


def row_needs(row_bytes: Sequence[tuple[int, int]], prompt: int, max_tokens: int) -> int:
    """Bytes that one request takes at most, alone: its slot, and the smaller one or the
    prefill's state from which it is copied.

    Args:
        row_bytes: see `Capabilities`; empty = nothing is known, 0.
    """
    if not row_bytes:
        return 0

    def slot(tokens: int) -> int:
        return next((size for most, size in row_bytes if most >= tokens), row_bytes[-1][1])

    return slot(prompt) + slot(prompt + max_tokens)
