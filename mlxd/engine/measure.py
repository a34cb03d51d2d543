"""What this machine can do with a model, by the engine's own parts alone.

`python -m mlxd.engine.measure FOLDER` reads one JSON object from standard input,
`{"prompts": [text, …], "max_tokens": 48}`, and prints one: how fast these chat
prompts prefill, and how fast as many rows decode greedily. No scheduler, no
sockets, nothing else at the same time: serving can only be slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import msgspec
from mlx_lm.utils import load_tokenizer

from mlxd.engine import attention, compiler, loading, warmup
from mlxd.engine.loading import LoadedModel
from mlxd.engine.port import Chunk
from mlxd.engine.runner import Runner
from mlxd.wire import BatchTuning, Lane, Sampling, Start, Submit

#: Passes after the first, which compiles; their median counts.
PASSES = 3
GREEDY = Sampling(seed=0, temperature=0.0)


class Work(msgspec.Struct, frozen=True):
    """What to measure with."""

    prompts: list[str]  # user messages; one row each
    max_tokens: int  # decode steps, at least 1


class Rates(msgspec.Struct, frozen=True):
    """What was measured; rates are tokens per second of all rows together."""

    prompt_tokens: float  # mean of a prompt, the template included
    prefill_rate: float
    decode_rate: float


def measure(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    steps: int,
    budget: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Prefill the prompts and decode all rows, several times over.

    Args:
        prompts: at most as many as the runner is wide, each of two tokens or more.
        budget: prompt tokens of one call to prefill.
    """
    passes = [_pass(runner, prompts, steps, budget, clock) for _ in range(1 + PASSES)]
    prefills, decodes = zip(*passes[1:], strict=True)
    total = sum(map(len, prompts))
    return Rates(
        prompt_tokens=total / len(prompts),
        prefill_rate=total / statistics.median(prefills),
        decode_rate=len(prompts) * steps / statistics.median(decodes),
    )


def _pass(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    steps: int,
    budget: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Seconds of prefill, and of `steps` steps, pipelined as the scheduler does it."""
    began = clock()
    for chunks in _calls(prompts, budget):
        runner.prefill(chunks)
    mx.synchronize()
    prefilled = clock()
    rows = range(len(prompts))
    for row in rows:
        runner.seat(row, Submit(row, Lane.BATCH, list(prompts[row]), steps, [], GREEDY))
    runner.decode(rows)
    runner.collect()  # joining is not decoding
    seated = clock()
    runner.decode(rows)
    for _ in range(steps - 1):
        runner.decode(rows)
        runner.collect()
    runner.collect()
    decoded = clock()
    for row in rows:
        runner.release(row)
    return prefilled - began, decoded - seated


def _calls(prompts: Sequence[Sequence[int]], budget: int) -> list[list[Chunk]]:
    """Whole prompts, as many in a call as the scheduler's budget lets through."""
    calls: list[list[Chunk]] = []
    room = 0
    for row, prompt in enumerate(prompts):
        tokens = prompt[:-1]  # the last one is fed to the first step
        if not calls or len(tokens) > room:
            calls.append([])
            room = budget
        calls[-1].append(Chunk(row, tokens, 0, last=True))
        room -= len(tokens)
    return calls


def of_model(folder: Path, work: Work) -> Rates:
    """Load a model, warm it up with the default settings, and measure.

    Raises:
        ValueError, FileNotFoundError: the folder holds no model for the batch lane.
    """
    tuning = BatchTuning(width=len(work.prompts), prefill_chunk=256, prefill_budget=512)
    start = Start(
        model_path=str(folder), dtype="auto", context=None, trust_remote_code=False, batch=tuning
    )
    if sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu):
        compiler.install(os.environ, Path(tempfile.gettempdir()))
    loaded = loading.load(start)
    with attention.seam(loaded.model, "auto"):
        return _measured(loaded, tuning, folder, work)


def _measured(loaded: LoadedModel, tuning: BatchTuning, folder: Path, work: Work) -> Rates:
    runner = Runner(loaded, tuning)
    serial_only = warmup.run(runner, loaded, tuning).capabilities.serial_only
    if serial_only is not None:
        raise ValueError(f"the batch lane cannot run this model: {serial_only}")
    tokenizer = load_tokenizer(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        for text in work.prompts
    ]
    return measure(runner, prompts, work.max_tokens, tuning.prefill_budget)


def main() -> int:
    """Measure what standard input asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mlxd.engine.measure")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    sys.stdout.write(msgspec.json.encode(of_model(chosen.folder, work)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
