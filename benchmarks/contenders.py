"""What decodes: mlxd's runner, and mlx-lm's own batch generator, over the same model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlxd.engine import attention
from mlxd.engine.loading import LoadedModel
from mlxd.engine.port import Chunk
from mlxd.engine.runner import Runner
from mlxd.wire import BatchTuning, Lane, Sampling, Submit

#: Steps before the ones that count: joining rows, first uses, a full pipeline.
WARM_STEPS = 6
#: Prompt tokens of one call; mlx-lm's own default.
PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Pass:
    """One batch from its prompts to its last step. Times in seconds."""

    prefill: float
    first: float  # the longest of the first steps
    steps: list[float]  # each one, from the tokens of one step to those of the next


class Contender(Protocol):
    """A way to decode a batch."""

    name: str

    def run(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], steps: int
    ) -> Pass:
        """Prefill the prompts, then decode all rows together."""
        ...


class Mlxd:
    """mlxd's runner, driven as its scheduler does it."""

    name = "mlxd"

    def __init__(self, loaded: LoadedModel, width: int) -> None:
        self._loaded = loaded
        self.tuning = BatchTuning(width, prefill_chunk=PREFILL_TOKENS, prefill_budget=0)
        self.runner = Runner(loaded, self.tuning)

    def run(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], steps: int
    ) -> Pass:
        """Prefill the prompts, then decode all rows together."""
        # mlx-lm's pass must see its own attention: the seam is only in place here.
        with attention.seam(self._loaded.model, "auto"):
            return self._run(prompts, samplings, steps)

    def _run(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], steps: int
    ) -> Pass:
        runner, rows = self.runner, range(len(prompts))
        began = time.perf_counter()
        together = max(1, PREFILL_TOKENS // len(prompts[0]))
        for first in range(0, len(prompts), together):
            self._prefill(list(rows[first : first + together]), prompts)
        mx.synchronize()
        prefilled = time.perf_counter()
        for row in rows:
            # No row reaches its limit here: none of its class's room may be missing.
            limit = WARM_STEPS + steps + runner.ahead
            request = Submit(row, Lane.BATCH, list(prompts[row]), limit, [], samplings[row])
            runner.seat(row, request)
        for _ in range(runner.ahead):
            runner.decode(rows)
        times = []
        for _ in range(WARM_STEPS + steps):
            before = time.perf_counter()
            runner.decode(rows)
            runner.collect()
            times.append(time.perf_counter() - before)
        for _ in range(runner.ahead):
            runner.collect()
        for row in rows:
            runner.release(row)
        runner.rest()
        return Pass(prefilled - began, max(times[:WARM_STEPS]), times[WARM_STEPS:])

    def _prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """All tokens of these rows' prompts but the last, chunk by chunk."""
        length = len(prompts[rows[0]]) - 1
        for start in range(0, length, PREFILL_TOKENS):
            end = min(start + PREFILL_TOKENS, length)
            self.runner.prefill(
                [Chunk(row, prompts[row][start:end], start, last=end == length) for row in rows]
            )


class MlxLm:
    """mlx-lm's `BatchGenerator`, with one of its samplers per row."""

    name = "mlx-lm"

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def run(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], steps: int
    ) -> Pass:
        """Prefill the prompts, then decode all rows together."""
        generator = BatchGenerator(
            self._model,
            completion_batch_size=len(prompts),
            prefill_step_size=PREFILL_TOKENS,
        )
        # None of its rows may end: one that joined early is ahead of the others.
        limit = 2 * len(prompts) + WARM_STEPS + steps
        began = time.perf_counter()
        generator.insert(
            [list(prompt) for prompt in prompts],
            max_tokens=[limit] * len(prompts),
            samplers=[
                make_sampler(s.temperature, top_p=s.top_p, min_p=s.min_p, top_k=s.top_k)
                for s in samplings
            ],
        )
        while len(generator.next()[1]) < len(prompts):
            pass
        prefilled = time.perf_counter()
        times = []
        for _ in range(WARM_STEPS + steps):
            before = time.perf_counter()
            generator.next()
            times.append(time.perf_counter() - before)
        mx.synchronize(generator.stream)
        generator.close()
        del generator
        mx.clear_cache()
        return Pass(prefilled - began, max(times[:WARM_STEPS]), times[WARM_STEPS:])
