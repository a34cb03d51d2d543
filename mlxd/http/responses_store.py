"""Responses that later requests may go on from: a bounded memory, lost when the daemon ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxd.errors import NotFound
from mlxd.http.body import to_json


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, and the conversation up to its end."""

    owner: str | None  # the name of the API key that made it
    body: dict[str, Any]
    conversation: tuple[dict[str, Any], ...]


class ResponseStore:
    """Keeps the most recently used responses."""

    def __init__(self, max_bytes: Callable[[], int]) -> None:
        """
        Args:
            max_bytes: of all in JSON; read whenever one comes, as a reload changes it.
        """
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[Stored, int]] = OrderedDict()  # with their sizes
        self._bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response; the least recently used make room for it."""
        size = len(to_json([stored.body, stored.conversation]))
        limit = self._max_bytes()
        if size > limit:
            return
        self._kept[stored.body["id"]] = (stored, size)
        self._bytes += size
        while self._bytes > limit:
            _id, (_stored, freed) = self._kept.popitem(last=False)
            self._bytes -= freed

    def get(self, response: str, owner: str | None, param: str | None = None) -> Stored:
        """A response of this owner's.

        Raises:
            NotFound: there is none of this id, or no more, or it is somebody else's.
        """
        found = self._kept.get(response)
        if found is None or found[0].owner != owner:
            raise NotFound(
                f"no response {response[:128]!r} is kept here",
                param=param,
                code="response_not_found",
            )
        self._kept.move_to_end(response)
        return found[0]

    def delete(self, response: str, owner: str | None) -> None:
        """Forget a response of this owner's. Raises NotFound, as `get`."""
        self.get(response, owner)
        _stored, size = self._kept.pop(response)
        self._bytes -= size
