"""What dashboards and rules ask of Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RULES = ROOT / "contrib/prometheus/mlxd.rules.yml"
RULE_TESTS = ROOT / "contrib/prometheus/mlxd.rules.test.yml"
CONFIG = ROOT / "contrib/prometheus/prometheus.yml"
DASHBOARD = ROOT / "contrib/grafana/mlxd.json"

#: As vLLM's published dashboard asks, by kind of series.
_VLLM_QUANTILES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
_VLLM_RATES = (
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
)
_VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_VLLM_SIZES = ("request_prompt_tokens", "request_generation_tokens")


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, rows left out."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def of_dashboard() -> Iterator[str]:
    """Every query of the dashboard, with all of its variables chosen."""
    for panel in panels():
        for target in panel["targets"]:
            yield with_variables(target["expr"])


def with_variables(expression: str) -> str:
    """What Grafana would send."""
    return re.sub(r"\$(instance|model|job)\b", ".*", expression).replace("$__rate_interval", "10s")


def of_vllms_dashboard(model: str) -> Iterator[str]:
    """The queries of vLLM's own, for one model."""
    only = f'{{model_name="{model}"}}'
    for name in _VLLM_QUANTILES:
        rate = f"rate(vllm:{name}_seconds_bucket{only}[10s])"
        yield f"histogram_quantile(0.99, sum by(le) ({rate}))"
        sums = (f"rate(vllm:{name}_seconds_{part}{only}[10s])" for part in ("sum", "count"))
        yield " / ".join(sums)
    for name in _VLLM_RATES:
        yield f"rate(vllm:{name}{only}[10s])"
    for name in _VLLM_GAUGES:
        yield f"vllm:{name}{only}"
    for name in _VLLM_SIZES:
        yield f"sum by(le) (increase(vllm:{name}_bucket{only}[10s]))"


def of_rule(rule: Mapping[str, Any]) -> str:
    """A rule's expression that gives data whether or not it fires."""
    expression: str = rule["query"]
    if rule["type"] == "recording":
        return expression
    asked, comparisons = re.subn(r" (==|>) ", r" \1 bool ", expression)
    assert comparisons == 1, expression
    return asked


def names(text: str) -> set[str]:
    """The series that a text asks for; what rules have recorded is left out."""
    without = re.sub(r"\binstance\w*:mlxd_\w+:\w+", "", text)
    return set(re.findall(r"\b(?:mlxd|process)_[a-z0-9_]+", without))
