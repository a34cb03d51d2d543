"""Every series that a dashboard or a rule asks for is there."""

from __future__ import annotations

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlxd.metrics import Metrics
from mlxd.metrics.model import ModelMetrics
from tests.contrib import queries
from tests.daemon.test_metrics import Figures


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Samples of a daemon with one model that nobody has asked anything yet."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add("tiny", Figures())
    ModelMetrics(metrics, "tiny")
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_dashboard_asks_for_what_there_is(exposed: set[str]) -> None:
    """A panel whose series was renamed would stay empty, and nobody would know."""
    asked = {name for expression in queries.of_dashboard() for name in queries.names(expression)}

    assert len(asked) > 25
    assert asked <= exposed


def test_the_rules_ask_for_what_there_is(exposed: set[str]) -> None:
    """An alert on a series that there is not never fires; its tests feed it the same ones."""
    asked = queries.names(queries.RULES.read_text())
    fed = queries.names(queries.RULE_TESTS.read_text())

    assert len(asked) > 8
    assert asked <= exposed
    assert fed <= exposed


def test_the_dashboard_shows_what_an_operator_looks_for() -> None:
    """Lanes and reasons, latency histograms, rows, queue, KV, cache, restarts and reloads."""
    asked = " ".join(queries.of_dashboard())

    for series in (
        *("mlxd_lane_decisions_total", "mlxd_requests_total", "mlxd_running_rows"),
        *("mlxd_waiting_requests", "mlxd_kv_bytes", "mlxd_prefix_cache_hit_tokens_total"),
        *("mlxd_engine_restarts_total", "mlxd_reloads_total", "mlxd_model_state"),
        *("mlxd_time_to_first_token_seconds_bucket", "mlxd_inter_token_seconds_bucket"),
    ):
        assert series in asked, series


def test_the_dashboard_fits_any_installation() -> None:
    """Its data source is a variable, ids are its own, and every panel says what it shows."""
    dashboard = json.loads(queries.DASHBOARD.read_text())
    panels = queries.panels()

    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert all(panel["title"] and panel["description"] for panel in panels)
