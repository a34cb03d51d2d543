"""The engine process, over a real socketpair and a tiny model on disk."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from msgspec import structs

from mlxd import wire
from mlxd.wire import (
    BatchTuning,
    Cancel,
    ClearCache,
    Finished,
    FinishReason,
    Held,
    Hello,
    Lane,
    LoadFailed,
    Phase,
    Ready,
    Start,
    Step,
    Stop,
    Submit,
)
from tests.engine.tiny import GREEDY, VOCAB, full, loaded, prompt, solo

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}


class Peer:
    """The daemon's end of the wire."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.end = end
        self.process = process
        self._file = end.makefile("rb")

    def send(self, *messages: wire.ToEngine) -> None:
        """Write frames."""
        self.end.sendall(b"".join(wire.pack(message) for message in messages))

    def frames(self) -> Iterator[wire.ToDaemon]:
        """Read frames until the engine is gone."""
        while header := self._file.read(wire.HEADER_BYTES):
            yield wire.unpack_to_daemon(self._file.read(wire.body_length(header)))

    def until(self, kind: type) -> wire.ToDaemon:
        """The next frame of this kind; others are passed over."""
        return next(frame for frame in self.frames() if isinstance(frame, kind))

    def hang_up(self) -> None:
        """Close the daemon's end, as its death would."""
        self._file.close()
        self.end.close()


@contextmanager
def engine() -> Iterator[Peer]:
    """A started engine process; killed in the end if it still runs."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    command = [sys.executable, "-m", "mlxd.engine", "--fd", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    peer = Peer(ours, process)
    try:
        yield peer
    finally:
        peer.hang_up()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    path = tmp_path_factory.mktemp("tiny")
    model = loaded(full()).model
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def start(folder: Path) -> Callable[..., Start]:
    """Start frames for the tiny model."""

    def make(path: Path = folder) -> Start:
        return Start(
            model_path=str(path),
            dtype="auto",
            context=None,
            trust_remote_code=False,
            batch=BatchTuning(4, 64, 128),
        )

    return make


def submit(number: int, tokens: list[int], count: int, lane: Lane = Lane.BATCH) -> Submit:
    """A greedy request without an end-of-sequence id."""
    return Submit(number, lane, tokens, count, [], GREEDY)


def collect(peer: Peer, wanted: set[int]) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    """Tokens and results until every wanted request has ended."""
    tokens: dict[int, list[int]] = {number: [] for number in wanted}
    results: dict[int, Finished] = {}
    for frame in peer.frames():
        if isinstance(frame, Step):
            for token in frame.tokens:
                tokens[token.id].append(token.token)
        if isinstance(frame, Finished):
            results[frame.id] = frame
        if set(results) == wanted:
            break
    return tokens, results


def test_an_engine_says_hello_loads_warms_up_and_serves_both_lanes(
    start: Callable[..., Start],
) -> None:
    """The whole conversation, with phases announced before what can block."""
    reference = loaded(full()).model
    with engine() as peer:
        frames = peer.frames()
        hello = next(frames)
        assert isinstance(hello, Hello)
        assert hello.pid == peer.process.pid
        peer.send(start())
        said = []
        for frame in frames:
            said.append(frame)
            if isinstance(frame, Ready):
                break
        assert [f.name for f in said if isinstance(f, Phase)] == ["load", "warmup"]
        ready = said[-1]
        assert isinstance(ready, Ready)
        assert ready.capabilities.vocab_size == VOCAB
        assert ready.capabilities.context == CONFIG["max_position_embeddings"]
        assert ready.capabilities.cache_classes == ["KVCache"]
        assert ready.capabilities.serial_only is None
        prompts = {1: prompt(9, 1), 2: prompt(80, 2), 3: prompt(30, 3)}
        peer.send(
            submit(1, prompts[1], 12),
            submit(2, prompts[2], 20),
            submit(3, prompts[3], 10, Lane.SERIAL),
        )
        tokens, results = collect(peer, {1, 2, 3})
    for number, count in ((1, 12), (2, 20), (3, 10)):
        assert tokens[number] == solo(reference, prompts[number], count)
        assert results[number].reason is FinishReason.LENGTH
        assert results[number].prefill_seconds >= 0
        assert results[number].decode_seconds > 0


def test_a_cancelled_request_is_answered_and_the_next_one_runs(start: Callable[..., Start]) -> None:
    """A consumer that went away frees its row."""
    with engine() as peer:
        peer.send(start(), submit(1, prompt(9, 1), 2000))
        peer.until(Step)
        peer.send(Cancel(1), submit(2, prompt(9, 2), 3))
        _tokens, results = collect(peer, {1, 2})
    assert results[1].reason is FinishReason.CANCELLED
    assert results[2].reason is FinishReason.LENGTH


def test_an_engine_that_does_nothing_tells_what_it_gave_back(start: Callable[..., Start]) -> None:
    """No step does: the pools go when it rests, the prefix cache when it is cleared; told once."""
    tuning = BatchTuning(4, 64, 128, prefix_cache=2**20)
    with engine() as peer:
        peer.send(structs.replace(start(), batch=tuning), submit(1, prompt(200, 1), 3))
        step = peer.until(Step)
        assert isinstance(step, Step)
        assert step.kv_bytes > 0
        rested = next(f for f in peer.frames() if isinstance(f, Held) and f.kv_bytes == 0)
        assert rested.prefix_bytes > 0
        peer.send(ClearCache(), ClearCache())
        assert peer.until(Held) == Held(0, 0)
        peer.send(Stop())
        assert not any(isinstance(frame, Held) for frame in peer.frames())


def test_the_engine_ends_when_the_daemon_is_gone(start: Callable[..., Start]) -> None:
    """End-of-file on the socket is enough, also in the middle of a generation."""
    with engine() as peer:
        peer.send(start(), submit(1, prompt(9, 1), 2000))
        peer.until(Step)
        peer.hang_up()
        assert peer.process.wait(timeout=20) == 0


def test_stop_ends_the_process_cleanly(start: Callable[..., Start]) -> None:
    """Exit status 0."""
    with engine() as peer:
        peer.send(start())
        peer.until(Ready)
        peer.send(Stop())
        assert peer.process.wait(timeout=20) == 0


def test_a_folder_without_weights_is_a_load_failure_with_a_reason(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    """The daemon is told why, and the process exits non-zero."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with engine() as peer:
        peer.send(start(tmp_path))
        failed = peer.until(LoadFailed)
        assert isinstance(failed, LoadFailed)
        assert "No safetensors found" in failed.message
        assert peer.process.wait(timeout=20) == 1


def test_a_model_that_brings_its_own_code_is_refused(
    start: Callable[..., Start], folder: Path, tmp_path: Path
) -> None:
    """The file named by the folder is not run unless the configuration trusts it."""
    marker = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(marker)!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_file": "custom.py"}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with engine() as peer:
        peer.send(start(tmp_path))
        failed = peer.until(LoadFailed)
        assert isinstance(failed, LoadFailed)
        assert "custom.py" in failed.message
    assert not marker.exists()
