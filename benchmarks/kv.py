"""What quantised KV saves, and what it costs: bytes per token, and KL to full precision.

    python -m benchmarks.kv FOLDER
    python -m benchmarks.kv FOLDER --rows 4 --tokens 16

Each row is a chat prompt and the model's own greedy answer to it at full precision. The
same tokens are then fed again, one by one, with 8 and 4 bits: all rows together on mlxd's
slots, and each alone on mlx-lm's own quantised cache, quantised from the first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_tokenizer

from mlxd.bench.prompts import chat_prompt
from mlxd.engine import loading
from mlxd.engine.loading import LoadedModel
from mlxd.engine.pool import Pool, rung_for
from mlxd.engine.step import forward
from mlxd.wire import BatchTuning, Start

BITS = (0, 8, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of a prompt, at least one, and those that are fed after it."""

    prompt: Sequence[int]
    answer: Sequence[int]


def on_slots(loaded: LoadedModel, rows: Sequence[Row]) -> list[mx.array]:
    """Log-probabilities [answer, vocabulary] of each row, all of them decoding together.

    Args:
        rows: with answers of one length.
    """
    layout = loaded.layout or []
    steps = len(rows[0].answer)
    columns = max(len(row.prompt) for row in rows) + steps
    pool = Pool(layout, columns, rung_for(len(rows), len(rows)))
    for row in rows:
        caches = loaded.make_caches()
        slot = pool.take()
        if len(row.prompt) > 1:
            loaded.model(mx.array([row.prompt[:-1]]), cache=caches)
            pool.join(slot, caches, 0, len(row.prompt) - 1, row.prompt[-1])
        else:
            pool.clear(slot)
    step = forward(loaded.model, layout, loaded.vocab_size, columns)
    found = []
    for index in range(steps):
        fed = [[*row.prompt[-1:], *row.answer][index] for row in rows]
        positions = mx.array([len(row.prompt) - 1 + index for row in rows], mx.int32)
        logits, arrays = step(mx.array(fed, mx.uint32), positions, pool.arrays())
        pool.adopt(arrays)
        found.append(_logprobs(logits))
        mx.eval(found[-1], arrays)
    return list(mx.stack(found, axis=1))


def alone(loaded: LoadedModel, row: Row) -> mx.array:
    """Log-probabilities [answer, vocabulary] of one row on mlx-lm's own caches."""
    caches = loaded.make_caches()
    if len(row.prompt) > 1:
        loaded.model(mx.array([row.prompt[:-1]]), cache=caches)
    found = []
    for token in [*row.prompt[-1:], *row.answer][: len(row.answer)]:
        logits = loaded.model(mx.array([[token]]), cache=caches)[0, -1, : loaded.vocab_size]
        found.append(_logprobs(logits))
        mx.eval(found[-1])
    return mx.stack(found)


def divergence(full: mx.array, other: mx.array) -> float:
    """KL(full || other) in nats, the mean over the tokens of a row [answer, vocabulary]."""
    return float((mx.exp(full) * (full - other)).sum(axis=-1).mean())


def bytes_per_token(loaded: LoadedModel) -> int:
    """What one more token takes of a row's slot."""
    return sum(spec.row_bytes(2) - spec.row_bytes(1) for spec in loaded.layout or [])


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _load(folder: Path, kv_bits: int) -> LoadedModel:
    tuning = BatchTuning(width=16, prefill_chunk=256, prefill_budget=512)
    start = Start(
        model_path=str(folder),
        dtype="auto",
        context=None,
        trust_remote_code=False,
        batch=tuning,
        kv_bits=kv_bits,
    )
    loaded = loading.load(start)
    if loaded.layout is None:
        raise ValueError("the batch lane cannot hold this model's state")
    return loaded


def _rows(loaded: LoadedModel, folder: Path, count: int, tokens: int) -> list[Row]:
    """Chat prompts with the model's own greedy answers."""
    tokenizer = load_tokenizer(folder)
    random = Random(0)  # noqa: S311  # the same prompts every time
    rows = []
    for number in range(count):
        message = {"role": "user", "content": chat_prompt(random, number)}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        steps = generate_step(mx.array(prompt), loaded.model, max_tokens=tokens)
        rows.append(Row(prompt, [int(token) for token, _logprobs in steps]))
    return rows


def main() -> int:
    """Print a line for every number of bits. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    chosen = parser.parse_args()
    full = _load(chosen.folder, 0)
    rows = _rows(full, chosen.folder, chosen.rows, chosen.tokens)
    wanted = [alone(full, row) for row in rows]
    print(f"{len(rows)} rows of {chosen.tokens} tokens, KL to full precision in nats a token")  # noqa: T201
    print("| kv_bits | bytes a token | slots: mean | worst row | mlx-lm: mean | worst row |")  # noqa: T201
    print("| --- | --- | --- | --- | --- | --- |")  # noqa: T201
    for bits in BITS:
        loaded = full if bits == 0 else _load(chosen.folder, bits)
        slots, own = (
            [divergence(*pair) for pair in zip(wanted, found, strict=True)]
            for found in (on_slots(loaded, rows), [alone(loaded, row) for row in rows])
        )
        cells = [statistics.mean(slots), max(slots), statistics.mean(own), max(own)]
        figures = " | ".join(f"{cell:.2e}" for cell in cells)
        print(f"| {bits} | {bytes_per_token(loaded):,} | {figures} |")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
