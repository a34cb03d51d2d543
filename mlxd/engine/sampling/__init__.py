"""Vectorised sampling: every row has its own parameters, all rows share a few calls.

One step of a pool goes through `process` (bias and penalties), `sample` (a token per
row) and `observe` (log-probabilities of the rows that asked), all enqueued together.
"""

from mlxd.engine.sampling.draw import sample
from mlxd.engine.sampling.logprobs import Observed, observe
from mlxd.engine.sampling.processors import process
from mlxd.engine.sampling.rows import Draw, RowSampler, uniform

__all__ = ["Draw", "Observed", "RowSampler", "observe", "process", "sample", "uniform"]
