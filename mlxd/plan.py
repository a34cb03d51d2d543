"""What a reload would do: a pure comparison of two configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel

from mlxd.config import Settings
from mlxd.errors import ConfigError

#: Model keys and tables that requests are served under; every other key is the engine's.
LIVE_MODEL_KEYS = frozenset({"aliases", "sampling", "batch", "policy"})
#: Keys of these that are the engine's all the same.
ENGINE_KEYS = frozenset({"batch.kv_bits"})
#: Keys that are used once, at start.
FIXED_KEYS = frozenset(
    {
        "server.listen",
        "server.cache_dir",
        "server.receive_timeout",
        "admin.listen",
        "traces.endpoint",
    }
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to each model, and which keys are the cause.

    What is replaced serves until its new engine is ready, but for those of `drain_first`:
    where memory has no room for both, the old one finishes what it has and ends before.
    `undo` names live changes that the file does not have: they are among the causes.
    """

    keep: Sequence[str] = ()
    retune: Mapping[str, Sequence[str]] = field(default_factory=dict)
    add: Sequence[str] = ()
    replace: Mapping[str, Sequence[str]] = field(default_factory=dict)
    drain_first: Sequence[str] = ()
    remove: Sequence[str] = ()
    undo: Mapping[str, Sequence[str]] = field(default_factory=dict)
    server: Sequence[str] = ()
    admin: Sequence[str] = ()
    metrics: Sequence[str] = ()
    log: Sequence[str] = ()
    memory: Sequence[str] = ()


def diff(old: Settings, new: Settings, file: Settings) -> Plan:
    """The plan that leads from one configuration to the other.

    Args:
        file: what `old` was read as, before it was changed live.

    Raises:
        ConfigError: a key changed that cannot change in a running daemon.
    """
    shared = {
        "server": tuple(changed_keys(old.server, new.server)),
        "admin": tuple(changed_keys(old.admin, new.admin)),
        "traces": tuple(changed_keys(old.traces, new.traces)),
    }
    changed = [f"{table}.{key}" for table, keys in shared.items() for key in keys]
    fixed = [key for key in changed if key in FIXED_KEYS]
    if fixed:
        raise ConfigError([f"{key}: changed; this needs a restart" for key in fixed])
    changes = {
        model_id: tuple(changed_keys(old.models[model_id], settings))
        for model_id, settings in new.models.items()
        if model_id in old.models
    }
    live = {model_id: all(map(_is_live, keys)) for model_id, keys in changes.items()}
    return Plan(
        keep=tuple(model_id for model_id, keys in changes.items() if not keys),
        retune={model_id: keys for model_id, keys in changes.items() if keys and live[model_id]},
        add=tuple(model_id for model_id in new.models if model_id not in old.models),
        replace={model_id: keys for model_id, keys in changes.items() if not live[model_id]},
        remove=tuple(model_id for model_id in old.models if model_id not in new.models),
        undo={
            model_id: undone
            for model_id, keys in changes.items()
            if (undone := tuple(key for key in _live(file, old, model_id) if key in keys))
        },
        server=shared["server"],
        admin=shared["admin"],
        metrics=tuple(changed_keys(old.metrics, new.metrics)),
        log=tuple(changed_keys(old.log, new.log)),
        memory=tuple(changed_keys(old.memory, new.memory)),
    )


def with_room(plan: Plan, needs: Mapping[str, int], free: int | None) -> Plan:
    """The plan, with those told that have no room beside what they replace.

    Args:
        needs: bytes of the engines that are replaced, without KV: as much as the new ones take.
        free: bytes that there are; None where that is not known, and all are taken to fit.
    """
    if free is None:
        return plan
    drain_first = []
    for model_id in plan.replace:
        if needs[model_id] > free:
            drain_first.append(model_id)
        else:
            free -= needs[model_id]
    return replace(plan, drain_first=tuple(drain_first))


def live_changes(file: Settings, now: Settings) -> list[str]:
    """Dotted paths of the keys that were changed live and differ from the file."""
    return [
        f"models.{model_id}.{key}" for model_id in now.models for key in _live(file, now, model_id)
    ]


def _live(file: Settings, now: Settings, model_id: str) -> Iterator[str]:
    return changed_keys(file.models[model_id], now.models[model_id])


def changed_keys(old: BaseModel, new: BaseModel, above: str = "") -> Iterator[str]:
    """Dotted paths of the keys whose values differ between two tables of one type."""
    for name in type(old).model_fields:
        before, after = (dict(table)[name] for table in (old, new))
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from changed_keys(before, after, f"{above}{name}.")
        elif before != after:
            yield f"{above}{name}"


def _is_live(key: str) -> bool:
    return key.partition(".")[0] in LIVE_MODEL_KEYS and key not in ENGINE_KEYS
