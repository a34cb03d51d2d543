"""Tiny models with random weights, and ways to run requests through an engine's parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import cohere2, exaone4, gemma3_text, gpt_oss, llama, olmo3, qwen3

from mlxd.engine.caches import make_caches
from mlxd.engine.constraint import Constraints
from mlxd.engine.loading import PROBE_TOKENS, LoadedModel
from mlxd.engine.pace import Pace
from mlxd.engine.pool import SMALLEST_CLASS
from mlxd.engine.runner import Runner
from mlxd.engine.scheduler import Event, Scheduler
from mlxd.engine.slots import layout_of
from mlxd.wire import BatchTuning, Finished, Lane, Sampling, Step, Submit, TokenLogprobs

VOCAB = 97
WINDOW = 16
FREE = Pace(steps=(), call=0.0, token=0.0, pair=0.0)  # nothing was measured
GREEDY = Sampling(seed=0, temperature=0.0)


def full() -> nn.Module:
    """Full attention in every layer, grouped heads."""
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
        )
    )


def sliding() -> nn.Module:
    """A sliding window in every layer."""
    model = mixed_llama()
    for layer in model.layers:
        layer.use_sliding = True
    return model


def mixed_llama() -> nn.Module:
    """Full and sliding layers side by side."""
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=WINDOW,
        )
    )


def mixed_gemma3() -> nn.Module:
    """Gemma 3: norms on queries and keys, two rotary bases, one full layer of three."""
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            head_dim=16,
            vocab_size=VOCAB,
            num_key_value_heads=2,
            sliding_window=WINDOW,
            sliding_window_pattern=3,
        )
    )


def mixed_cohere2() -> nn.Module:
    """Cohere 2: parallel blocks, no rotation in full layers."""
    return cohere2.Model(
        cohere2.ModelArgs(
            model_type="cohere2",
            hidden_size=32,
            head_dim=8,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            sliding_window=WINDOW,
            sliding_window_pattern=2,
        )
    )


def mixed_olmo3() -> nn.Module:
    """OLMo 3: norms behind each block."""
    return olmo3.Model(
        olmo3.ModelArgs(
            model_type="olmo3",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            max_position_embeddings=1024,
            sliding_window=WINDOW,
            rope_theta=10000.0,
        )
    )


def mixed_exaone4() -> nn.Module:
    """EXAONE 4: rotation in sliding layers only."""
    return exaone4.Model(
        exaone4.ModelArgs(
            model_type="exaone4",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=64,
            num_attention_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            rope_theta=10000.0,
            head_dim=8,
            tie_word_embeddings=False,
            rope_scaling={},
            sliding_window=WINDOW,
            sliding_window_pattern="LLGL",
        )
    )


def sinks_gpt_oss() -> nn.Module:
    """GPT-OSS: attention sinks, experts, alternating windows."""
    return gpt_oss.Model(
        gpt_oss.ModelArgs(
            model_type="gpt_oss",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            vocab_size=VOCAB,
            sliding_window=WINDOW,
        )
    )


def full_qwen3() -> nn.Module:
    """Qwen 3: norms on queries and keys, tied head."""
    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            rope_theta=10000.0,
            head_dim=8,
            tie_word_embeddings=True,
        )
    )


MODELS = (
    full,
    sliding,
    mixed_llama,
    mixed_gemma3,
    mixed_cohere2,
    mixed_olmo3,
    mixed_exaone4,
    sinks_gpt_oss,
    full_qwen3,
)


def loaded(
    model: nn.Module,
    context: int = 4096,
    seed: int = 0,
    constraints: Constraints | None = None,
    kv_bits: int = 0,
) -> LoadedModel:
    """The model with random float32 weights that make its greedy text wander."""
    mx.random.seed(seed)
    model.update(
        tree_map(
            lambda a: mx.random.normal(a.shape) * 0.3 if a.ndim > 1 else a.astype(mx.float32),
            model.parameters(),
        )
    )
    model.eval()
    mx.eval(model.parameters())
    caches = make_caches(model, kv_bits)
    mx.eval(model(mx.array([[0] * PROBE_TOKENS]), cache=caches))
    names = sorted({type(cache).__name__ for cache in caches})
    return LoadedModel(
        model,
        VOCAB,
        context,
        names,
        layout_of(caches),
        mx.float32,
        weight_bytes=0,
        seconds=0.0,
        constraints=constraints,
        kv_bits=kv_bits,
    )


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    tokens: list[int] = np.array(
        mx.random.randint(0, VOCAB, (length,), key=mx.random.key(seed))
    ).tolist()
    return tokens


def solo(model: nn.Module, tokens: Sequence[int], count: int) -> list[int]:
    """mlx-lm's own greedy generation of `count` tokens, alone."""
    steps = generate_step(mx.array(list(tokens)), model, max_tokens=count)
    return [int(token) for token, _logprobs in steps]


class Engine:
    """A scheduler over a real runner, driven step by step; no clock, no process."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        width: int = 4,
        chunk: int = 64,
        prefix_cache: int = 0,
        smallest_class: int = SMALLEST_CLASS,
    ) -> None:
        clock = itertools.count().__next__
        tuning = BatchTuning(width, chunk, 2 * chunk, prefix_cache)
        self.model = model.model
        self.runner = Runner(model, tuning, smallest_class)
        self.scheduler = Scheduler(self.runner, tuning, FREE, lambda: float(clock()))
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self.finished: dict[int, Finished] = {}

    def submit(
        self,
        number: int,
        tokens: Sequence[int],
        count: int,
        *,
        sampling: Sampling = GREEDY,
        lane: Lane = Lane.BATCH,
        eos: Iterable[int] = (),
    ) -> None:
        """Send a request."""
        self.tokens[number] = []
        self.logprobs[number] = []
        self.scheduler.submit(Submit(number, lane, list(tokens), count, list(eos), sampling))

    def step(self) -> None:
        """One iteration."""
        for event in self.scheduler.step():
            self.take(event)

    def take(self, event: Event) -> None:
        """Note what an event says of a request."""
        if isinstance(event, Step):
            for token in event.tokens:
                self.tokens[token.id].append(token.token)
                self.logprobs[token.id].append(token.logprobs)
        elif isinstance(event, Finished):
            assert event.id not in self.finished, "a request ended twice"
            self.finished[event.id] = event

    def run(self) -> None:
        """Step until nothing is left to do."""
        while not self.scheduler.idle:
            self.step()
