"""Loading a model, and finding out what its layers need."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxd.engine.slots import LayerSpec, layout_of
from mlxd.wire import Start

#: Context where neither the model nor the configuration names one.
FALLBACK_CONTEXT = 8192
#: Traits that this engine's batch lane can take with any model.
BATCHABLE = ("seed",)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and the facts that serving needs."""

    model: nn.Module
    vocab_size: int
    context: int
    cache_classes: list[str]
    layout: list[LayerSpec] | None  # None = the batch lane cannot hold its state
    weight_bytes: int
    seconds: float


def load(start: Start) -> LoadedModel:
    """Load the model of a `Start` frame into memory.

    Raises:
        ValueError, FileNotFoundError: the folder holds no model that can be served.
    """
    began = time.perf_counter()
    path = Path(start.model_path)
    model, config = load_model(path, lazy=True, trust_remote_code=start.trust_remote_code)
    dtype = _dtype(start.dtype)
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    caches, vocab_size = _probe(model)
    return LoadedModel(
        model=model,
        vocab_size=vocab_size,
        context=_context(config, start.context),
        cache_classes=sorted({type(cache).__name__ for cache in caches}),
        layout=layout_of(caches),
        weight_bytes=sum(array.nbytes for array in _weights(model).values()),
        seconds=time.perf_counter() - began,
    )


def _dtype(name: str) -> mx.Dtype | None:
    """The dtype to convert weights to; None leaves them as they are.

    On a CPU every other type is many times slower than float32.
    """
    if name == "auto":
        return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None
    return {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[name]


def _probe(model: nn.Module) -> tuple[list[Any], int]:
    """The model's caches after two tokens, and how many ids it knows.

    Two tokens in one call, so that every cache class has made its arrays. Both
    the embedding and the head bound the ids: one beyond the embedding kills
    the process on a CPU.
    """
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0, 0]]), cache=caches)
    mx.eval(logits)
    vocab_size = logits.shape[-1]
    for name, array in _weights(model).items():
        if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight")):
            vocab_size = min(vocab_size, array.shape[0])
    return caches, vocab_size


def _weights(model: nn.Module) -> dict[str, mx.array]:
    """Every weight by its path."""
    return cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))


def _context(config: dict[str, Any], wanted: int | None) -> int:
    """The smaller of the model's own context and the configured one."""
    text = config.get("text_config") or {}
    own = config.get("max_position_embeddings") or text.get("max_position_embeddings")
    known = [n for n in (own, wanted) if n is not None]
    return min(known) if known else FALLBACK_CONTEXT


def weight_file_bytes(path: Path) -> int:
    """Bytes of the weight files, for a loading budget; 0 where there are none."""
    return sum(file.stat().st_size for file in path.glob("model*.safetensors"))


def architecture(path: Path) -> str:
    """`model_type` of the folder's config.json, for messages."""
    return str(json.loads((path / "config.json").read_text()).get("model_type", "unknown"))
