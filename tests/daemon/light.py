"""Light parts for a daemon: fake engines, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from mlxd.host.restarts import RestartPolicy
from mlxd.host.watchdog import WatchPolicy
from mlxd.text.detokenize import BytePieces
from mlxd.text.tokenizer import Tokenizer

#: Three deaths in a row, and hardly any waiting between them.
QUICK_RESTARTS = RestartPolicy(first=0.01, longest=0.02, limit=3)
#: Little doubt, but time for a process to start on a busy machine.
QUICK_WATCH = WatchPolicy(start=30.0, answer=0.3, confirm=0.1)
ENGINE_COMMAND = (sys.executable, "-m", "tests.daemon.fake_engine")


class ByteWrapper:
    """What `Tokenizer` uses of mlx-lm's wrapper; token 0 ends."""

    eos_token_ids = frozenset({0})
    has_chat_template = True
    chat_template = None

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: object) -> list[int]:
        return list("".join(str(message["content"]) for message in messages).encode())


async def load_byte_tokenizer(_folder: Path, _trust_remote_code: bool) -> Tokenizer:
    """Loads nothing."""
    pieces = BytePieces([bytes([value]) for value in range(256)], bytes)
    worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-bytes")
    return Tokenizer(cast("Any", ByteWrapper()), pieces, worker, longest=1)


def model_folder(parent: Path, name: str = "model") -> Path:
    """A folder that passes for a model in MLX's layout."""
    folder = parent / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder
