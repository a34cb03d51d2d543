"""The memory budget: what all models' weights, work and KV may take together, and who gets what."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mlxd.wire import Ready

#: Tokens by which a prefill's state may be larger than its prompt.
STATE_GRAIN = 512

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
    row_bytes: Sequence[tuple[int, int]]  # see `Capabilities`


class NoRoom(Exception):
    """An engine's weights and work do not fit beside the others'."""


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

        Raises:
            NoRoom: too little would be left for it, or for one that serves; all stays as it was.
        """
        needs = Needs(ready.weight_bytes, ready.working_bytes, kv)
        member = Member(needs, ready.device_bytes, allow, ready.capabilities.row_bytes)
        members = {**self._members, key: member}
        for split in self._split(members).items():
            self._check(*split, members)
        self._members = members
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
        if not self._members and self._configured is None:
            return None
        taken = sum(m.needs.weights + m.needs.working for m in self._members.values())
        return self._budget(self._members) - taken

    def _check(self, key: Hashable, kv_bytes: int, members: Mapping[Hashable, Member]) -> None:
        smallest = row_needs(members[key].row_bytes, 1, 1)
        if kv_bytes < smallest:
            taken = sum(each.needs.weights + each.needs.working for each in members.values())
            raise NoRoom(
                f"the weights and work of {len(members)} engines take {taken} bytes of the memory "
                f"budget of {self._budget(members)}; {kv_bytes} would be left for the rows of "
                f"one, and its smallest takes {smallest}"
            )

    def _share_out(self) -> None:
        for key, kv_bytes in self._split(self._members).items():
            self._members[key].allow(kv_bytes)

    def _split(self, members: Mapping[Hashable, Member]) -> dict[Hashable, int]:
        needs = {key: member.needs for key, member in members.items()}
        return shares(self._budget(members), needs)

    def _budget(self, members: Mapping[Hashable, Member]) -> int:
        if self._configured is not None:
            return self._configured
        return min((member.device for member in members.values()), default=0)


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
    """Bytes that one request takes at most, alone: its last slot, and beside it the state of its
    prefill, or the slot of the class below from which it moves up.

    Args:
        row_bytes: see `Capabilities`; empty = nothing is known, 0.
    """
    if not row_bytes:
        return 0
    capacities = [capacity for capacity, _size in row_bytes]
    last, first = _class(capacities, prompt + max_tokens), _class(capacities, prompt)
    capacity, size = row_bytes[last]
    state = size * (prompt + STATE_GRAIN) // capacity
    below = row_bytes[last - 1][1] if first < last else 0
    return size + max(state, below)


def _class(capacities: Sequence[int], tokens: int) -> int:
    """Which class so many tokens take: the smallest that holds them, or the last."""
    return min(bisect_left(capacities, tokens), len(capacities) - 1)
