"""The serial lane: one request at a time through mlx-lm's own generator.

It is the reference that the batch lane is tested against. We prefill the
caches ourselves, in chunks, so that the engine can look at its inbox between
them, and hand the generator the last prompt token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlxd.engine import prefill
from mlxd.engine.constraint import Constraint, constrain
from mlxd.engine.port import RowFailed, SerialSteps
from mlxd.engine.sampling import RowSampler, sample
from mlxd.wire import FinishReason, Sampling, Submit, TokenLogprobs

Processor = Callable[[mx.array, mx.array], mx.array]


def generate(
    model: nn.Module,
    vocab_size: int,
    request: Submit,
    chunk: int,
    caches: list[Any],
    constraint: Constraint | None,
) -> SerialSteps:
    """Yield None after each prefill chunk, then (token, its log-probabilities).

    The generator ends after `max_tokens` tokens; end-of-sequence is the
    caller's business.

    Args:
        caches: the model's own, empty; updated in place.
        constraint: the request's grammar.
    """
    prompt = mx.array(request.prompt, dtype=mx.uint32)
    for start in range(0, len(request.prompt) - 1, chunk):
        stop = min(start + chunk, len(request.prompt) - 1)
        model(prompt[None, start:stop], cache=caches)
        mx.eval(prefill.arrays_of(caches))
        yield None
    steps = generate_step(
        prompt[-1:],
        model,
        max_tokens=request.max_tokens,
        sampler=_sampler(request, vocab_size),
        logits_processors=[
            # A head wider than the embedding could give a token that cannot be fed.
            lambda _tokens, logits: logits[:, :vocab_size],
            *_processors(request.sampling, prompt[:-1]),
            *([_follows(constraint)] if constraint is not None else []),
        ],
        prompt_cache=caches,
    )
    for chosen, logprobs in steps:
        token = int(chosen)
        yield token, _logprobs(logprobs, token, request.sampling.logprobs)


def _sampler(request: Submit, vocab_size: int) -> Callable[[mx.array], mx.array]:
    """The batch lane's sampler for one row: the same draws at the same positions.

    `generate_step` samples each position once, in order, so a counter tells
    the position.
    """
    row = RowSampler.of(request.sampling, vocab_size)
    positions = count(len(request.prompt))

    def sampler(logprobs: mx.array) -> mx.array:
        return sample(logprobs, [row], [row.draw(next(positions))])

    return sampler


def _processors(sampling: Sampling, prefix: mx.array) -> list[Processor]:
    """mlx-lm's processors, each shown the whole sequence.

    Given a warm cache the generator would show them only what it was given
    itself; they are pure functions of (prompt + tokens so far) this way.
    """
    made = make_logits_processors(
        logit_bias=sampling.logit_bias or None,
        repetition_penalty=_unless(1.0, sampling.repetition_penalty),
        repetition_context_size=sampling.repetition_context_size,
        presence_penalty=_unless(0.0, sampling.presence_penalty),
        presence_context_size=sampling.presence_context_size,
        frequency_penalty=_unless(0.0, sampling.frequency_penalty),
        frequency_context_size=sampling.frequency_context_size,
    )

    def over_everything(processor: Processor) -> Processor:
        return lambda tokens, logits: processor(mx.concatenate([prefix, tokens]), logits)

    return [over_everything(processor) for processor in made]


def _follows(constraint: Constraint) -> Processor:
    """The grammar as a processor, which is shown the last prompt token and the answer."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        constraint.follow(np.array(tokens)[1:].tolist())
        if constraint.error is not None:
            raise RowFailed(constraint.error, FinishReason.FORMAT)
        return constrain(logits, {0: constraint})

    return processor


def _unless(neutral: float, value: float) -> float | None:
    return None if value == neutral else value


def _logprobs(logprobs: mx.array, token: int, wanted: int | None) -> TokenLogprobs | None:
    """The chosen token's log-probability and the `wanted` best, from [vocabulary]."""
    if wanted is None:
        return None
    top: list[tuple[int, float]] = []
    if wanted:
        best = np.array(mx.argpartition(-logprobs, wanted - 1)[:wanted])
        pairs = [(int(token), float(logprobs[token])) for token in best]
        # Impossible tokens are left out, as in the batch lane.
        possible = [pair for pair in pairs if pair[1] > -math.inf]
        top = sorted(possible, key=lambda pair: -pair[1])
    return TokenLogprobs(float(logprobs[token]), top)
