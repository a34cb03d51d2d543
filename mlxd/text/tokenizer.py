"""One model's tokenizer, in a worker thread of its own.

Loading runs in the process's one MLX thread; what a loaded tokenizer does needs no
MLX and runs in its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mlxd.errors import BadRequest, ModelNotReady
from mlxd.text.detokenize import ByteDetokenizer, BytePieces, Detokenizer, WindowDetokenizer
from mlxd.text.infill import Infill
from mlxd.text.loading import (
    MLX_THREAD,
    TokenizerError,
    byte_pieces,
    find_markup,
    is_jinja,
    load_wrapper,
)
from mlxd.text.markup import CONTENT, Markup

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper  # noqa: TID251 - its type only

__all__ = ["Tokenizer", "TokenizerError"]

P = ParamSpec("P")
T = TypeVar("T")


class Tokenizer:
    """Text to tokens and back. Every call into the library runs in the one worker.

    Make one with `Tokenizer.load`; `close` it when the model goes.
    """

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        pieces: BytePieces | None,
        worker: ThreadPoolExecutor,
        longest: int,
        markup: Markup | None = None,
        infill: Infill | None = None,
    ) -> None:
        """
        Args:
            longest: characters of the longest token; none stands for more text.
            markup: how the model marks reasoning and tool calls; None = it does not.
            infill: its tokens for filling gaps; None = it fills none.
        """
        self.longest = longest
        self.markup = markup or Markup()
        self.infill = infill
        self._wrapper = wrapper
        self._pieces = pieces
        self._worker = worker
        self._closed = False
        # A client's text makes no control tokens; mlx-lm's own templates know nothing of that.
        self._sanitized = {"sanitize_control_tokens": True} if is_jinja(wrapper) else {}
        self.eos_token_ids: frozenset[int] = frozenset(wrapper.eos_token_ids)
        self.vocab_size: int = len(wrapper)
        #: Tokens of a line's end. Nobody else has the wrapper yet.
        self.newline: tuple[int, ...] = tuple(wrapper.encode("\n", add_special_tokens=False))

    @classmethod
    async def load(cls, path: Path, *, trust_remote_code: bool) -> Tokenizer:
        """Load the tokenizer of a model folder; one loads at a time in the process.

        Raises:
            TokenizerError: the folder cannot be used, or asks for its own code to
                be run and `trust_remote_code` is false.
        """

        def load() -> Tokenizer:
            wrapper = load_wrapper(path, trust_remote_code=trust_remote_code)
            worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"tokenizer-{path.name}")
            vocabulary = wrapper.get_vocab()
            return cls(
                wrapper,
                byte_pieces(wrapper),
                worker,
                longest=max(map(len, vocabulary)),
                markup=find_markup(wrapper),
                infill=Infill.of(vocabulary),
            )

        return await asyncio.wrap_future(MLX_THREAD.submit(load))

    def close(self) -> None:
        """End the worker when it has done what it was given; later calls are refused."""
        self._closed = True
        self._worker.shutdown(wait=False)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that uses this tokenizer, in its worker.

        Raises:
            ModelNotReady: the model has been unloaded.
        """
        if self._closed:
            raise ModelNotReady("the model has been unloaded")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: function(*args, **kwargs))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a plain prompt, with the tokenizer's own BOS unless told not to."""
        return await self.run(self._encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Tokens of a conversation up to where the assistant speaks.

        The template writes its own BOS, so none is added.

        Args:
            continues: the assistant goes on with the last message, which is its own.

        Raises:
            BadRequest: naming `messages`; the model has no chat template, or its
                template refuses these messages.
        """
        kwargs = dict(chat_template_kwargs or {})
        return await self.run(self._encode_chat, messages, tools, kwargs, continues=continues)

    async def opening(self, prompt: Sequence[int]) -> str:
        """The part in which the answer to a conversation's tokens begins."""
        if self.markup.opening is None:
            return CONTENT
        return await self.run(self.markup.opening, prompt)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens, special ones included."""
        return await self.run(self._decode, tokens)

    async def strings(self, tokens: Sequence[int]) -> list[str]:
        """Each token as its vocabulary writes it."""
        return await self.run(self._strings, tokens)

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming detokenizer, for one request."""
        if self._pieces is None:
            return WindowDetokenizer(self._decode)
        return ByteDetokenizer(self._pieces)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._wrapper.encode(text, add_special_tokens=add_special_tokens))

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any],
        *,
        continues: bool,
    ) -> list[int]:
        if not self._wrapper.has_chat_template:
            raise BadRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            tokens: list[int] = self._wrapper.apply_chat_template(  # type: ignore[no-untyped-call]
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self._sanitized,
                **chat_template_kwargs,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return tokens

    def _decode(self, tokens: Sequence[int]) -> str:
        # Without the clean-up of spaces, which eats them before punctuation and
        # which no streaming detokenizer does.
        return str(self._wrapper.decode(list(tokens), clean_up_tokenization_spaces=False))

    def _strings(self, tokens: Sequence[int]) -> list[str]:
        return [str(token) for token in self._wrapper.convert_ids_to_tokens(list(tokens))]
