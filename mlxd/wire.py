"""The frames between the daemon and an engine process, and the nouns both sides share.

A frame is a 4-byte big-endian length and one msgpack-encoded struct. Frames
travel over an inherited socketpair: end-of-file on it is how either side
learns, at once, that the other is gone.

This module imports neither MLX nor anything of the daemon.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024


class Lane(StrEnum):
    """Where a request runs: with others, or alone."""

    BATCH = "batch"
    SERIAL = "serial"


class FinishReason(StrEnum):
    """How the engine ended a row."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FORMAT = "format"  # its grammar cannot be followed: the request's own fault
    ERROR = "error"


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request, every default resolved.

    Filters apply in mlx-lm's order: top_p, min_p, XTC, top_k, then temperature.
    """

    seed: int  # 64 bits unsigned; drawn by the daemon when the client set none
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    xtc_probability: float = 0.0  # 0 = off
    xtc_threshold: float = 0.1
    xtc_special: list[int] = msgspec.field(default_factory=list)  # tokens that XTC never removes
    repetition_penalty: float = 1.0  # 1 = off
    repetition_context_size: int = 20
    presence_penalty: float = 0.0  # 0 = off
    presence_context_size: int = 20
    frequency_penalty: float = 0.0  # 0 = off
    frequency_context_size: int = 20
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    grammar: str | None = None  # of mlxd.grammar; what the answer must be
    # Tokens that end the reasoning which the prompt has opened; the grammar begins behind them.
    grammar_after: list[int] = msgspec.field(default_factory=list)
    # None = no log-probabilities; 0 = the chosen token's; k = the k best as well.
    logprobs: int | None = None


class Pacing(StrEnum):
    """Who waits for whom while prompts are prefilled and rows decode."""

    LATENCY = "latency"  # tokens come soon after each other
    BALANCED = "balanced"
    THROUGHPUT = "throughput"  # prompts are through soon


class BatchTuning(msgspec.Struct, frozen=True):
    """The batch settings that an engine can change between two steps."""

    width: int
    prefill_chunk: int
    prefill_budget: int
    prefix_cache: int = 0  # bytes; 0 = none
    pacing: Pacing = Pacing.BALANCED


# --- daemon to engine ---------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """First frame: which model to load and how."""

    model_path: str
    dtype: str  # "auto" | "float32" | "float16" | "bfloat16"
    context: int | None  # None = the model's own
    trust_remote_code: bool
    batch: BatchTuning
    attention: str = "auto"  # | "fused"
    kernels: str = "native"  # | "portable"
    kv_bits: int = 0  # of full attention's keys and values: 8, 4, or 0 = as computed


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run one request. Ids are unique for the life of the connection."""

    id: int
    lane: Lane
    prompt: list[int]  # every id is below Capabilities.vocab_size, at least one
    max_tokens: int  # a real number, at least 1
    eos: list[int]
    sampling: Sampling


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request. Unknown or finished ids are ignored; else `Finished` follows."""

    id: int


class Retune(msgspec.Struct, frozen=True, tag=True):
    """Change batch settings between two steps; running rows are not touched."""

    batch: BatchTuning


class ClearCache(msgspec.Struct, frozen=True, tag=True):
    """Forget the prefix cache; what runs keeps its state."""


class Budget(msgspec.Struct, frozen=True, tag=True):
    """How much the rows' state and the prefix cache may take together, from now on."""

    kv_bytes: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process now. The daemon has drained before, if it wanted to."""


ToEngine = Start | Submit | Cancel | Retune | ClearCache | Budget | Stop


# --- engine to daemon ---------------------------------------------------------


class Blas(msgspec.Struct, frozen=True):
    """What does matrix products on the CPU, as found in the process's memory map."""

    name: str  # "openblas" | "mkl" | "accelerate" | "reference" | "none" (not a CPU engine)
    path: str | None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First frame of the engine, before it loads anything."""

    pid: int
    mlx: str
    mlx_lm: str
    device: str
    blas: Blas


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Said before anything that can block; `budget` seconds is what it may take."""

    name: str  # "load" | "warmup" | "prefill" | "step" | "serial" | "idle"
    budget: float | None  # None while idle: nothing is due
    # Prompt tokens computed since the load. A phase announced again with the same count and
    # no other frame in between is no progress.
    done: int = 0


class Capabilities(msgspec.Struct, frozen=True):
    """What this engine can do with the loaded model."""

    vocab_size: int
    context: int
    cache_classes: list[str]  # distinct mlx-lm cache classes, sorted
    # Why the model can only run in the serial lane ("cache"), or None.
    serial_only: str | None
    # The traits of SPEC 1 that the batch lane can take with this model.
    batchable: list[str]
    structured: bool = False  # whether either lane can follow a grammar
    # What a row costs: the tokens it can have at most, and its bytes; smallest first.
    row_bytes: list[tuple[int, int]] = []
    # Bits of a number in the keys and values of full attention; 0 = as the model computes it.
    kv_bits: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warmed up."""

    capabilities: Capabilities
    load_seconds: float
    warmup_seconds: float
    weight_bytes: int
    working_bytes: int = 0  # beside weights and KV, what computing takes at its peak
    device_bytes: int = 0  # what models may take of this device where nobody says


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served. The engine exits after this frame."""

    message: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The request left the engine's waiting line; its prefill begins."""

    id: int
    cached_tokens: int = 0  # prompt tokens whose state came from the prefix cache


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """The row's state gave way to an older one's; it will be computed again, and go on."""

    id: int


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural log-probabilities after processors, before temperature."""

    chosen: float
    top: list[tuple[int, float]]  # (token id, log-probability), best first


class Token(msgspec.Struct, frozen=True):
    """One generated token of one request. An end-of-sequence token is never sent."""

    id: int
    token: int
    logprobs: TokenLogprobs | None = None


class Step(msgspec.Struct, frozen=True, tag=True):
    """One iteration: the tokens it gave, in the order of their rows."""

    lane: Lane
    rows: int  # rows that decoded in this step
    seconds: float  # wall time since the previous step's end, or the iteration's start
    tokens: list[Token]
    kv_bytes: int  # all pools and unfinished prefills together
    prefix_bytes: int = 0  # of the prefix cache
    peak_bytes: int = 0  # the most that MLX held at any one time so far


class Held(msgspec.Struct, frozen=True, tag=True):
    """What changed without a step: an engine that rests, or whose cache was cleared or cut."""

    kv_bytes: int  # as in `Step`
    prefix_bytes: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The one terminal frame of a request."""

    id: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    # Every token sampled for the row and accounted to it, an end-of-sequence
    # token included; equals the Token frames sent, plus one for `stop`.
    generated_tokens: int
    # Sampled for this row after its end (the pipeline runs one step ahead).
    discarded_tokens: int
    prefill_seconds: float
    decode_seconds: float
    error: str | None = None
    # Prompt tokens whose state was computed for this request, cached ones left out.
    prefilled_tokens: int = 0


ToDaemon = Hello | Phase | Ready | LoadFailed | Started | Preempted | Step | Held | Finished


_encoder = msgspec.msgpack.Encoder()
_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_daemon_decoder: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)


def pack(message: ToEngine | ToDaemon) -> bytes:
    """The message as one frame, header included."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Length of the body that follows this header.

    Raises:
        ValueError: longer than any frame can be; the stream is out of step.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
    return length


def unpack_to_engine(body: bytes) -> ToEngine:
    """Decode a frame's body that came from the daemon."""
    return _engine_decoder.decode(body)


def unpack_to_daemon(body: bytes) -> ToDaemon:
    """Decode a frame's body that came from an engine."""
    return _daemon_decoder.decode(body)
