"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Mapping

from mlxd.bench.pressure import PRESSURE, Beside, Flood, Repeated
from mlxd.bench.scenarios import PLAIN, ClosedLoop, LongJoin

Scenario = ClosedLoop | LongJoin | Beside | Repeated | Flood

SCENARIOS: Mapping[str, Scenario] = {**PLAIN, **PRESSURE}
#: Measures the daemon's own start; there is nothing to compare it with.
STARTUP = "startup"
