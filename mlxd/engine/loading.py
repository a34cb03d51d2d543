"""Loading a model, and finding out what its layers need."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxd.engine.caches import REFUSALS, make_caches, why_not_quantised
from mlxd.engine.constraint import Constraints
from mlxd.engine.slots import LayerSpec, layout_of
from mlxd.wire import Start

#: Where models' configurations name their context.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
#: Context where neither the model nor the configuration names one.
FALLBACK_CONTEXT = 8192
#: Tokens of the call that shows what a model's caches look like.
PROBE_TOKENS = 8
#: Traits that this engine's batch lane can take with any model.
BATCHABLE = ("seed", "logprobs", "penalties", "logit_bias", "structured", "kv_quant")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and the facts that serving needs."""

    model: nn.Module
    vocab_size: int
    context: int
    cache_classes: list[str]
    layout: list[LayerSpec] | None  # None = the batch lane cannot hold its state
    logits_dtype: mx.Dtype
    weight_bytes: int
    seconds: float
    constraints: Constraints | None = None  # None = no structured output, in either lane
    kv_bits: int = 0  # of full attention's keys and values; 0 = model precision

    def make_caches(self) -> list[Any]:
        """Empty caches of a prompt, one per layer."""
        return make_caches(self.model, self.kv_bits)


def load(start: Start) -> LoadedModel:
    """Load the model of a `Start` frame into memory.

    Raises:
        ValueError, FileNotFoundError: the folder holds no model that can be served, or none
            that can be with these `kv_bits`.
    """
    began = time.perf_counter()
    path = Path(start.model_path)
    model, config = load_model(path, lazy=True, trust_remote_code=start.trust_remote_code)
    dtype = _dtype(start.dtype)
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    caches, vocab_size, logits_dtype = _probe(model)
    if start.kv_bits:
        name = f"{path.name} ({config.get('model_type')})"
        caches = _quantised(model, name, caches, start.kv_bits)
    return LoadedModel(
        model=model,
        vocab_size=vocab_size,
        context=_context(config, start.context),
        cache_classes=sorted({type(cache).__name__ for cache in caches}),
        layout=layout_of(caches),
        logits_dtype=logits_dtype,
        constraints=Constraints.of_folder(path, vocab_size),
        weight_bytes=sum(array.nbytes for array in _weights(model).values()),
        seconds=time.perf_counter() - began,
        kv_bits=start.kv_bits,
    )


def _dtype(name: str) -> mx.Dtype | None:
    """The dtype to convert weights to; None leaves them as they are.

    On a CPU every other type is many times slower than float32.
    """
    if name == "auto":
        return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None
    return {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[name]


def _probe(model: nn.Module) -> tuple[list[Any], int, mx.Dtype]:
    """The model's caches after a few tokens, how many ids it knows, its logits' dtype.

    Several tokens in one call, so that every cache class has made its arrays, and
    an array that grows to a few tokens is as long as it gets. Both
    the embedding and the head bound the ids: one beyond the embedding kills
    the process on a CPU. The largest embedding is the tokens'; smaller ones are
    of positions or types.
    """
    caches = make_caches(model, kv_bits=0)
    logits = model(mx.array([[0] * PROBE_TOKENS]), cache=caches)
    mx.eval(logits)
    embeddings = [
        module.weight.shape[0]
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
    ]
    return caches, min(logits.shape[-1], max(embeddings, default=logits.shape[-1])), logits.dtype


def _quantised(model: nn.Module, name: str, own: list[Any], kv_bits: int) -> list[Any]:
    """The model's quantised caches after a few tokens.

    Args:
        own: those of model precision after a few tokens.

    Raises:
        ValueError: it cannot have them; says why.
    """
    reason = why_not_quantised(own)
    caches = make_caches(model, kv_bits)
    if reason is None:
        try:
            mx.eval(model(mx.array([[0] * PROBE_TOKENS]), cache=caches))
        except REFUSALS as error:
            # Attention sinks, say, or a model that computes with the cache's arrays itself.
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        raise ValueError(f"batch.kv_bits = {kv_bits} cannot be had with {name}: {reason}")
    return caches


def _weights(model: nn.Module) -> dict[str, mx.array]:
    """Every weight by its path."""
    return cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))


def _context(config: dict[str, Any], wanted: int | None) -> int:
    """The smaller of the model's own context and the configured one."""
    text = config.get("text_config") or {}
    known = (source.get(key) for source in (config, text) for key in CONTEXT_KEYS)
    own = next((value for value in known if isinstance(value, int)), None)
    if own is None:
        own = wanted or FALLBACK_CONTEXT
        print(f"the model names no context; {own} tokens are assumed", file=sys.stderr)  # noqa: T201
    elif wanted is not None and wanted > own:
        print(f"context = {wanted} is above the model's own {own}", file=sys.stderr)  # noqa: T201
    return min(own, wanted or own)


def weight_file_bytes(path: Path) -> int:
    """Bytes of the weight files, for a loading budget; 0 where there are none."""
    return sum(file.stat().st_size for file in path.glob("model*.safetensors"))
