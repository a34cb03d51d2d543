"""Draw one token per row, whatever mixture of settings the rows have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxd.engine.sampling.programs import Columns, Filters, narrow, wide
from mlxd.engine.sampling.ragged import ragged
from mlxd.engine.sampling.rows import NARROW_LIMITS, Draw, RowSampler
from mlxd.wire import Sampling

#: Row, settings, and what chance decides.
Chosen = tuple[int, Sampling, Draw]


def sample(logits: mx.array, rows: Sequence[RowSampler | None], draws: Sequence[Draw]) -> mx.array:
    """Draw one token per row. A row's token never depends on its neighbours.

    Args:
        logits: [rows, vocabulary]; log-probabilities do as well.
        rows: a sampler per row; None where the slot is free (its token means nothing).
        draws: what chance decides, per row.

    Returns:
        uint32 [rows].
    """
    if any(row is not None and row.program == "greedy" for row in rows):
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
    else:
        tokens = mx.zeros((logits.shape[0],), mx.uint32)
    for program in ("narrow", "wide"):
        chosen = [
            (index, row.settings, draw)
            for index, (row, draw) in enumerate(zip(rows, draws, strict=True))
            if row is not None and row.program == program
        ]
        if chosen:
            tokens = _draw(logits, tokens, program, chosen)
    return tokens


def _draw(logits: mx.array, tokens: mx.array, program: str, chosen: list[Chosen]) -> mx.array:
    """Replace the tokens of the chosen rows by draws of one program."""
    count, total = len(chosen), logits.shape[0]
    # A few row counts only, so that a few shapes are compiled. The padding repeats
    # the last row, with the same draw: the same token twice.
    padded = min(1 << (count - 1).bit_length(), total)
    chosen = chosen + [chosen[-1]] * (padded - count)
    settings = [settings for _row, settings, _draw in chosen]
    index = mx.array([row for row, _settings, _draw in chosen])
    subset, columns = logits if count == total else logits[index], _columns(chosen)
    if program == "narrow":
        limit = next(n for n in NARROW_LIMITS if n >= max(s.top_k for s in settings))
        nucleus = any(s.top_p < 1 for s in settings)
        picked = narrow(subset, columns, limit, nucleus=nucleus)
    else:
        filters = Filters(
            top_p=any(s.top_p < 1 for s in settings),
            min_p=any(s.min_p > 0 for s in settings),
            top_k=any(0 < s.top_k < logits.shape[1] for s in settings),
            xtc=any(draw.xtc for _row, _settings, draw in chosen),
        )
        picked = wide(subset, columns, filters)
    return mx.put_along_axis(tokens, index, picked, axis=0)


def _columns(chosen: Sequence[Chosen]) -> Columns:
    table = np.array(
        [
            (
                draw.number,
                draw.inside,
                s.temperature,
                s.top_p,
                math.log(s.min_p) if s.min_p > 0 else -math.inf,
                s.top_k,
                s.xtc_threshold if draw.xtc else math.inf,
            )
            for _row, s, draw in chosen
        ],
        dtype=np.float32,
    )
    number, inside, temperature, top_p, log_min_p, top_k, xtc = np.split(table, 7, axis=1)
    return Columns(
        number=mx.array(number),
        inside=mx.array(inside),
        temperature=mx.array(temperature),
        top_p=mx.array(top_p),
        log_min_p=mx.array(log_min_p),
        top_k=mx.array(top_k.astype(np.int32)),
        xtc=mx.array(xtc),
        special=mx.array(_special(chosen)),
    )


def _special(chosen: Sequence[Chosen]) -> np.ndarray:
    """Tokens that XTC leaves alone, int32 [rows, a power of two], filled up with -1."""
    lists = [s.xtc_special if draw.xtc else [] for _row, s, draw in chosen]
    return ragged(lists, np.int32(-1), smallest=8)
