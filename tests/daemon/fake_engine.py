"""An engine process without a model: real frames, rows that count up the alphabet.

Its behaviour is scripted by the model's `env` table and by prompts:

- `FAKE_LOAD`: `ok`, `fail`, `die`, or the path of a file to wait for.
- `FAKE_GATE`: a file without which every row stays at its third token.
- `FAKE_BURST`: tokens that a row gives in one step, instead of one.
- `FAKE_TOKEN`: the one token of every row, instead of the alphabet.
- `FAKE_BATCHABLE`: the only trait that it can batch, instead of all.
- `FAKE_HANG`: `phase:file`; the first time that it says this phase it stops
  itself as SIGSTOP does, unless the file is there, which it makes.
- `FAKE_BUDGET`: seconds that its phases may take, instead of 60.
- `FAKE_STUBBORN`: neither a `Stop` frame, nor end-of-file, nor SIGTERM ends it.
- A prompt that begins with `!` kills the process at the row's third token, one
  that begins with `*` before its first, and one that begins with `?` fails its
  own row at its third.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mlxd.policy import TRAITS
from mlxd.wire import (
    HEADER_BYTES,
    Blas,
    Cancel,
    Capabilities,
    Finished,
    FinishReason,
    Hello,
    Lane,
    LoadFailed,
    Phase,
    Ready,
    Retune,
    Start,
    Started,
    Step,
    Stop,
    Submit,
    ToDaemon,
    ToEngine,
    Token,
    body_length,
    pack,
    unpack_to_engine,
)

STEP_SECONDS = 0.002
BUDGET = float(os.environ.get("FAKE_BUDGET", "60"))
GATED_TOKENS = 3
CONTEXT = 100_000
WEIGHTS = 12345  # bytes
KV_BYTES = 1000  # of one row


@dataclass
class Row:
    """A request that runs."""

    submit: Submit
    generated: int = 0


class Gone(Exception):
    """The daemon has closed its end."""


class Engine:
    """The loop of a real one: read inbox, step, write outbox."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox = b""
        self.line: list[Submit] = []
        self.rows: list[Row] = []
        self.width = 1
        self.phase = "start"
        self.burst = int(os.environ.get("FAKE_BURST", "1"))
        self.token = int(os.environ["FAKE_TOKEN"]) if "FAKE_TOKEN" in os.environ else None

    def send(self, frame: ToDaemon) -> None:
        self.connection.sendall(pack(frame))

    def say(self, phase: str) -> None:
        """Announce a phase, and hang in it if that is the script."""
        self.phase = phase
        self.send(Phase(phase, None if phase == "idle" else BUDGET))
        where, _, file = os.environ.get("FAKE_HANG", ":").partition(":")
        if where == phase and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def receive(self, *, wait: float | None) -> list[ToEngine]:
        """Frames that have come, after at most `wait` seconds; None = until one comes."""
        if not select.select([self.connection], [], [], wait)[0]:
            return []
        data = self.connection.recv(1 << 20)
        if not data:
            raise Gone
        self.inbox += data
        frames = []
        while len(self.inbox) >= HEADER_BYTES:
            end = HEADER_BYTES + body_length(self.inbox[:HEADER_BYTES])
            if len(self.inbox) < end:
                break
            frames.append(unpack_to_engine(self.inbox[HEADER_BYTES:end]))
            self.inbox = self.inbox[end:]
        return frames

    def load(self) -> None:
        self.send(Hello(os.getpid(), "0", "0", "fake", Blas("none", None)))
        start, *early = self.receive(wait=None)
        if isinstance(start, Stop):
            raise Gone
        assert isinstance(start, Start)
        self.width = start.batch.width
        self.say("load")
        how = os.environ.get("FAKE_LOAD", "ok")
        if how == "fail":
            self.send(LoadFailed("there are no weights in it"))
            sys.exit(1)
        if how == "die":
            print("Segmentation fault in the weights", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while how != "ok" and not Path(how).exists():
            time.sleep(STEP_SECONDS)
        self.say("warmup")
        only = os.environ.get("FAKE_BATCHABLE")
        batchable = list(TRAITS) if only is None else [only]
        capabilities = Capabilities(256, CONTEXT, ["KVCache"], None, batchable)
        self.send(Ready(capabilities, 0.1, 0.1, WEIGHTS, device_bytes=10**9))
        self.say("idle")
        for frame in early:
            self.hear(frame)

    def run(self) -> None:
        self.load()
        while True:
            wait = STEP_SECONDS if self.rows or self.line else None
            for frame in self.receive(wait=wait):
                self.hear(frame)
            self.admit()
            self.step()
            if self.phase != "idle" and not (self.rows or self.line):
                self.say("idle")

    def hear(self, frame: ToEngine) -> None:
        match frame:
            case Submit():
                self.line.append(frame)
            case Cancel(id=number):
                for submit in [s for s in self.line if s.id == number]:
                    self.line.remove(submit)
                    self.finish(Row(submit), FinishReason.CANCELLED)
                for row in [r for r in self.rows if r.submit.id == number]:
                    self.rows.remove(row)
                    self.finish(row, FinishReason.CANCELLED)
            case Retune():
                self.width = frame.batch.width
            case Stop():
                raise Gone

    def admit(self) -> None:
        while self.line:
            serial = self.line[0].lane is Lane.SERIAL
            busy_serial = any(row.submit.lane is Lane.SERIAL for row in self.rows)
            if busy_serial or (serial and self.rows) or len(self.rows) >= self.width:
                return
            submit = self.line.pop(0)
            self.rows.append(Row(submit))
            self.send(Started(submit.id))
            self.say("prefill")
            if chr(submit.prompt[0]) == "*":
                os.kill(os.getpid(), signal.SIGKILL)

    def step(self) -> None:
        gate = os.environ.get("FAKE_GATE")
        closed = gate is not None and not Path(gate).exists()
        moving = [row for row in self.rows if not (closed and row.generated == GATED_TOKENS)]
        if not moving:
            return
        self.say("serial" if moving[0].submit.lane is Lane.SERIAL else "step")
        tokens = []
        for row in moving:
            for _ in range(min(self.burst, row.submit.max_tokens - row.generated)):
                token = ord("a") + row.generated % 26 if self.token is None else self.token
                tokens.append(Token(row.submit.id, token))
                row.generated += 1
        kv_bytes = KV_BYTES * len(self.rows)
        lane = moving[0].submit.lane
        self.send(Step(lane, len(moving), STEP_SECONDS, tokens, kv_bytes))
        for row in moving:
            self.end_if_due(row)

    def end_if_due(self, row: Row) -> None:
        kind = chr(row.submit.prompt[0])
        if row.generated == GATED_TOKENS and kind == "!":
            print("libc++abi: terminating", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if row.generated == GATED_TOKENS and kind == "?":
            self.rows.remove(row)
            self.finish(row, FinishReason.ERROR)
        elif row.generated == row.submit.max_tokens:
            self.rows.remove(row)
            self.finish(row, FinishReason.LENGTH)

    def finish(self, row: Row, reason: FinishReason) -> None:
        prompt = len(row.submit.prompt)
        error = "the step failed on purpose" if reason is FinishReason.ERROR else None
        generated = row.generated
        computed = prompt if generated else 0
        self.send(
            Finished(row.submit.id, reason, prompt, 0, generated, 0, 0.0, 0.0, error, computed)
        )


def main() -> None:
    """Serve the socket that is named by `--fd N`."""
    stubborn = "FAKE_STUBBORN" in os.environ
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    try:
        Engine(connection).run()
    except (Gone, ConnectionError):
        while stubborn:
            signal.pause()


if __name__ == "__main__":
    main()
