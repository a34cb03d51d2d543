"""The pure comparison behind a reload."""

from __future__ import annotations

import pytest

from mlxd import plan as planning
from mlxd.config import (
    BatchSettings,
    LogSettings,
    ModelSettings,
    PolicySettings,
    ServerSettings,
    Settings,
)
from mlxd.errors import ConfigError
from mlxd.plan import Plan, live_changes, with_room


def settings(
    server: ServerSettings | None = None,
    log: LogSettings | None = None,
    **models: ModelSettings,
) -> Settings:
    """A configuration of these models."""
    return Settings(server=server or ServerSettings(), log=log or LogSettings(), models=models)


def diff(old: Settings, new: Settings, file: Settings | None = None) -> Plan:
    """The plan; without a file, nothing was changed live."""
    return planning.diff(old, new, file or old)


A = ModelSettings(source="/models/a")


def test_equal_configurations_keep_everything():
    """What is unchanged is not touched."""
    assert diff(settings(a=A), settings(a=A)) == Plan(keep=("a",))


def test_a_value_that_is_written_out_is_no_change():
    """Writing a default into the file changes nothing."""
    written = A.model_copy(update={"policy": PolicySettings(seed="batch")})

    assert diff(settings(a=A), settings(a=written)).keep == ("a",)


def test_live_keys_retune_and_are_named():
    """Batch, policy, sampling and aliases change without a restart of the engine."""
    new = A.model_copy(
        update={
            "aliases": ("default",),
            "batch": BatchSettings(width=4, queue=1),
            "policy": PolicySettings(seed="serial"),
        }
    )

    plan = diff(settings(a=A), settings(a=new))

    assert plan.retune == {"a": ("aliases", "batch.width", "batch.queue", "policy.seed")}
    assert plan.replace == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", "/models/b"),
        ("dtype", "float32"),
        ("context", 512),
        ("blas", "none"),
        ("env", {"A": "1"}),
        ("trust_remote_code", True),
    ],
)
def test_engine_keys_replace_the_model(key: str, value: object):
    """What an engine is started with makes a new engine, beside live changes or not."""
    new = A.model_copy(update={key: value, "aliases": ("default",)})

    plan = diff(settings(a=A), settings(a=new))

    assert plan.retune == {}
    assert set(plan.replace["a"]) == {key, "aliases"}


def test_kv_bits_are_the_engines_though_they_stand_in_a_live_table():
    """Caches of one kind cannot become those of another: a new engine, and no live change."""
    new = A.model_copy(update={"batch": BatchSettings(kv_bits=8, width=4)})

    plan = diff(settings(a=A), settings(a=new))

    assert plan.retune == {}
    assert plan.replace == {"a": ("batch.width", "batch.kv_bits")}


def test_models_come_and_go():
    """Models are told apart by id alone."""
    plan = diff(settings(a=A, b=A), settings(b=A, c=A))

    assert (plan.keep, plan.add, plan.remove) == (("b",), ("c",), ("a",))


def test_server_and_log_changes_are_listed():
    """The plan also says what changes for the daemon itself."""
    plan = diff(
        settings(a=A),
        settings(ServerSettings(drain_timeout=1.0), LogSettings(level="debug"), a=A),
    )

    assert (plan.server, plan.log) == (("drain_timeout",), ("level",))


def test_what_cannot_change_live_is_refused_by_name():
    """A listener or a cache that moves needs a restart, and says so for each key."""
    moved = ServerSettings(listen="127.0.0.1:1", cache_dir="/elsewhere", max_body=1)

    with pytest.raises(ConfigError) as caught:
        diff(settings(a=A), settings(moved, a=A))

    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "server.listen",
        "server.cache_dir",
    ]
    assert all("needs a restart" in problem for problem in caught.value.problems)


def test_live_changes_that_a_file_undoes_are_listed():
    """Those that the new file has as well are not undone."""
    live = A.model_copy(
        update={"batch": BatchSettings(width=4, queue=1), "policy": PolicySettings(seed="serial")}
    )
    new = A.model_copy(update={"batch": BatchSettings(width=8, queue=1)})

    plan = diff(settings(a=live), settings(a=new), settings(a=A))

    assert plan.undo == {"a": ("batch.width", "policy.seed")}
    assert plan.retune == {"a": ("batch.width", "policy.seed")}
    assert live_changes(settings(a=A), settings(a=live)) == [
        "models.a.batch.width",
        "models.a.batch.queue",
        "models.a.policy.seed",
    ]


@pytest.mark.parametrize(
    ("free", "drain_first"), [(None, ()), (30, ()), (15, ("b",)), (9, ("a", "b"))]
)
def test_what_has_no_room_for_both_drains_first(free: int | None, drain_first: tuple[str, ...]):
    """In the file's order, each that fits takes its part of what is free."""
    plan = Plan(replace={"a": ("context",), "b": ("context",)})

    assert with_room(plan, {"a": 10, "b": 10}, free).drain_first == drain_first
