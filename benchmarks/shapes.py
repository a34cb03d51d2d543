"""Models in the shape of well-known ones, with random weights: speed needs no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import make_prompt_cache

from mlxd.engine.loading import LoadedModel
from mlxd.engine.slots import layout_of

#: Columns that the caches of every shape can hold.
CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class Shape:
    """One model: its sizes, and the precision of its weights."""

    name: str
    make: Callable[[], nn.Module]
    dtype: mx.Dtype
    bits: int | None = None  # None = weights in `dtype`


@dataclass(frozen=True, slots=True)
class Built:
    """A model in memory and what a decode step of it has to read at least.

    Attributes:
        weight_bytes: bytes of weights that every step reads: all of them, but of an
            embedding that is not also the head, which gives one line per row.
        column_bytes: bytes of keys and values that one row has per token.
    """

    loaded: LoadedModel
    weight_bytes: int
    column_bytes: int

    def step_bytes(self, rows: int, context: int) -> int:
        """Bytes that a step of so many rows with so many tokens each has to read."""
        return self.weight_bytes + rows * context * self.column_bytes


def _tiny() -> nn.Module:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=1000,
            tie_word_embeddings=False,
        )
    )


def _small() -> nn.Module:
    """Qwen3-0.6B's sizes."""
    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=1024,
            num_hidden_layers=28,
            intermediate_size=3072,
            num_attention_heads=16,
            rms_norm_eps=1e-6,
            vocab_size=151936,
            num_key_value_heads=8,
            max_position_embeddings=40960,
            rope_theta=1e6,
            head_dim=128,
            tie_word_embeddings=True,
        )
    )


def _large() -> nn.Module:
    """Llama-3-8B's sizes."""
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=4096,
            num_hidden_layers=32,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            vocab_size=128256,
            rope_theta=5e5,
            tie_word_embeddings=False,
        )
    )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", _tiny, mx.float32),
        Shape("0.6b", _small, mx.bfloat16),
        Shape("8b", _large, mx.bfloat16),
        Shape("8b-4bit", _large, mx.bfloat16, bits=4),
    )
}


def build(shape: Shape, seed: int = 0) -> Built:
    """Make the model and its random weights, layer by layer in memory."""
    mx.random.seed(seed)
    model = shape.make()
    model.update(tree_map(lambda a: _random(a, shape.dtype), model.parameters()))
    if shape.bits is not None:
        nn.quantize(model, group_size=64, bits=shape.bits)
    model.eval()
    mx.eval(model.parameters())
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0, 0]]), cache=caches)
    mx.eval(logits)
    layout = layout_of(caches)
    if layout is None:
        raise ValueError(f"{shape.name}: the batch lane cannot hold this model's state")
    weights = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
    total = sum(array.nbytes for array in weights.values())
    tied = not any(path.startswith("lm_head") for path in weights)
    embedding = sum(a.nbytes for path, a in weights.items() if "embed_tokens" in path)
    loaded = LoadedModel(
        model=model,
        vocab_size=logits.shape[-1],
        context=CONTEXT,
        cache_classes=sorted({type(cache).__name__ for cache in caches}),
        layout=layout,
        logits_dtype=logits.dtype,
        weight_bytes=total,
        seconds=0.0,
    )
    return Built(
        loaded,
        weight_bytes=total if tied else total - embedding,
        column_bytes=sum(spec.row_bytes(1) for spec in layout),
    )


def _random(weights: mx.array, dtype: mx.Dtype) -> mx.array:
    """Small numbers; norms stay at 1, as in a trained model."""
    if weights.ndim == 1:
        return weights.astype(dtype)
    random = (mx.random.normal(weights.shape, dtype=mx.bfloat16) * 0.02).astype(dtype)
    mx.eval(random)
    return random
