"""How deep JSON is nested: what is not checked can overflow the stack of whoever follows it."""

from __future__ import annotations

from collections.abc import Mapping


def levels(value: object, most: int) -> int:
    """Levels of objects and lists; a scalar has none. Stops counting beyond `most`."""
    depth, level = 0, [value]
    while depth <= most and (level := [v for v in level if isinstance(v, Mapping | list)]):
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, Mapping) else v)]
    return depth
