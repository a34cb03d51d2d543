"""Whether a model steps on slots, and computes there what it computes on mlx-lm's own caches.

Some models look into their caches: they take the offset for a number, count the
columns, or shape the mask to their own liking. Most of them fail on slots, but a few
would go on with wrong numbers, so every model's logits are compared once at load.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from mlxd.engine.caches import REFUSALS
from mlxd.engine.loading import LoadedModel
from mlxd.engine.pool import SMALLEST_COLUMNS, Pool
from mlxd.engine.slots import LayerSpec
from mlxd.engine.step import Forward, forward

#: Lengths of the rows, one of them without any state yet. With a free slot they make
#: a rung of 4, so that no mask fits by broadcasting over a model's heads unnoticed.
LENGTHS = (7, 1, 4)
RUNG = 4
#: How far logits may be apart, relative to their spread: what other shapes of the same
#: sums make of float32, and what they make of 16 bits, where an expert may change as well, or
#: of quantised KV, where a last bit may turn into another step.
EXACT, ROUNDED = 1e-3, 0.2

Stepping = Literal["compiled", "plain"]


def stepping(loaded: LoadedModel) -> Stepping | None:
    """How a step of a few rows gives their own logits; None, and standard error says why not.

    A step that cannot be compiled still batches: each token just costs more of the host.
    """
    if loaded.layout is None:
        return None
    step = forward(loaded.model, loaded.layout, loaded.vocab_size, SMALLEST_COLUMNS)
    kinds: dict[Stepping, Forward] = {"compiled": mx.compile(step), "plain": step}
    for kind, trial in kinds.items():
        try:
            distance, limit = _distance(loaded, loaded.layout, trial)
        except REFUSALS as error:
            print(f"a {kind} step does not run on slots: {error!r}", file=sys.stderr)  # noqa: T201
            continue
        if distance <= limit:
            return kind
        text = f"logits of a {kind} step on slots are {distance:.3g} of their spread from their own"
        print(text, file=sys.stderr)  # noqa: T201
        return None
    return None


def _distance(
    loaded: LoadedModel, layout: Sequence[LayerSpec], step: Forward
) -> tuple[float, float]:
    """The largest distance of a row's logits to its own, and how large it may be."""
    model, vocab_size = loaded.model, loaded.vocab_size
    pool = Pool(layout, SMALLEST_COLUMNS, RUNG)
    wanted = []
    positions = [0] * RUNG
    for number, length in enumerate(LENGTHS):
        tokens = [(17 * number + 5 * index + 1) % vocab_size for index in range(length)]
        slot = pool.take()
        positions[slot] = length - 1
        caches = loaded.make_caches()
        if length > 1:
            model(mx.array([tokens[:-1]]), cache=caches)
            pool.join(slot, caches, 0, length - 1, tokens[-1])
        else:
            pool.clear(slot)
            pool.feed(slot, mx.array(tokens[-1], mx.uint32))
        wanted.append(model(mx.array([tokens[-1:]]), cache=caches)[0, -1, :vocab_size])
    logits, _arrays = step(pool.tokens, mx.array(positions, dtype=mx.int32), pool.arrays())
    own = mx.stack(wanted)
    limit = EXACT if own.dtype == mx.float32 and not loaded.kv_bits else ROUNDED
    own = own.astype(mx.float32)
    centred = own - own.mean(axis=-1, keepdims=True)
    difference = logits[: len(LENGTHS)].astype(mx.float32) - own
    spread = mx.maximum(centred.square().sum(axis=-1), 1e-12)
    return float(mx.sqrt(difference.square().sum(axis=-1) / spread).max()), limit
