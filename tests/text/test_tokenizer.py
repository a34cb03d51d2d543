"""The tokenizer in its worker: prompts in, text out, what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from mlxd.errors import BadRequest, ModelNotReady
from mlxd.text.tokenizer import Tokenizer, TokenizerError

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def tokenizer(starter_path: Path) -> AsyncIterator[Tokenizer]:
    """The starter's."""
    loaded = await Tokenizer.load(starter_path, trust_remote_code=False)
    yield loaded
    loaded.close()


def copy_of(starter_path: Path, folder: Path) -> Path:
    """The starter's tokenizer files, to be changed."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(starter_path / name, folder / name)
    return folder


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None takes one away."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))


async def test_prompts_are_tokenised_as_mlx_lm_does(
    tokenizer: Tokenizer, starter_path: Path
) -> None:
    """Completions as `encode`, chat as the template with the assistant's opening."""
    reference = load_tokenizer(starter_path)
    assert await tokenizer.encode("Once upon a time") == reference.encode("Once upon a time")
    assert await tokenizer.encode_chat(HELLO) == reference.apply_chat_template(
        HELLO, add_generation_prompt=True
    )
    assert await tokenizer.decode([*reference.encode("hi"), 2]) == "hi<|im_end|>"


async def test_end_of_sequence_ids_come_from_every_config(
    starter_path: Path, tmp_path: Path
) -> None:
    """generation_config.json counts before config.json; the tokenizer's own is added."""
    folder = copy_of(starter_path, tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    tokenizer = await Tokenizer.load(folder, trust_remote_code=False)
    assert tokenizer.eos_token_ids == {0, 7, 2}
    assert tokenizer.vocab_size == 49152
    tokenizer.close()


async def test_a_model_that_asks_for_its_own_code_is_refused(
    starter_path: Path, tmp_path: Path
) -> None:
    """Nothing of it is run; the error names the file and the key."""
    folder = copy_of(starter_path, tmp_path)
    change(folder / "config.json", model_file="mine.py")
    with pytest.raises(TokenizerError, match=r"mine\.py.*trust_remote_code"):
        await Tokenizer.load(folder, trust_remote_code=False)


async def test_a_tokenizer_that_asks_for_its_own_code_is_refused(
    starter_path: Path, tmp_path: Path
) -> None:
    """A tokenizer class in the folder is not imported."""
    folder = copy_of(starter_path, tmp_path)
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["mine.Mine", None]},
    )
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(TokenizerError, match="trust_remote_code"):
        await Tokenizer.load(folder, trust_remote_code=False)


async def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Not a traceback of a library."""
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        await Tokenizer.load(tmp_path, trust_remote_code=False)


async def test_a_missing_chat_template_is_the_clients_error(
    starter_path: Path, tmp_path: Path
) -> None:
    """It names `messages`; completions still work."""
    folder = copy_of(starter_path, tmp_path)
    change(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = await Tokenizer.load(folder, trust_remote_code=False)
    with pytest.raises(BadRequest) as caught:
        await tokenizer.encode_chat(HELLO)
    assert caught.value.param == "messages"
    assert await tokenizer.encode("hi")
    tokenizer.close()


async def test_what_a_template_refuses_is_the_clients_error(
    starter_path: Path, tmp_path: Path
) -> None:
    """The template's own words reach the client."""
    folder = copy_of(starter_path, tmp_path)
    change(
        folder / "tokenizer_config.json",
        chat_template="{{ raise_exception('roles must alternate') }}",
    )
    tokenizer = await Tokenizer.load(folder, trust_remote_code=False)
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        await tokenizer.encode_chat(HELLO)
    assert caught.value.param == "messages"
    tokenizer.close()


async def test_a_closed_tokenizer_says_that_the_model_is_gone(starter_path: Path) -> None:
    """A request that met an unload is refused, not broken."""
    tokenizer = await Tokenizer.load(starter_path, trust_remote_code=False)
    tokenizer.close()
    with pytest.raises(ModelNotReady):
        await tokenizer.encode("hi")


async def test_the_event_loop_runs_while_a_long_prompt_is_tokenised(tokenizer: Tokenizer) -> None:
    """Tokenising is in a thread that lets others run."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await tokenizer.encode("a long prompt " * 20_000)
    ticking.cancel()
    assert ticks > 100


def test_nothing_heavy_is_imported_with_the_text_layer() -> None:
    """mlx-lm, MLX and transformers come with the first load, after the listener is bound."""
    code = (
        "import sys, mlxd.http.app, mlxd.text.tokenizer;"
        "sys.exit(bool({'mlx', 'mlx_lm', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
