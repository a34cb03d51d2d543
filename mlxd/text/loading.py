"""What mlx-lm does for the daemon: finding a model's tokenizer.

The only file of the daemon that imports mlx-lm, inside functions that run in
`MLX_THREAD`: nothing of it is loaded before the listener is bound, and MLX is told
to keep to the CPU first, so that the daemon never opens a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxd.text.detokenize import BytePieces, byte_level_piece, spm_piece
from mlxd.text.markup import CALL, CONTENT, REASONING, Machine, Markup
from mlxd.text.mlxthread import MlxThread

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

#: One for the process, so that tokenizers load one at a time: the first load imports
#: transformers, whose lazy modules are not safe to import from two threads at once.
MLX_THREAD = MlxThread()


class TokenizerError(Exception):
    """A model folder whose tokenizer cannot be used, and why."""


def load_wrapper(path: Path, *, trust_remote_code: bool) -> TokenizerWrapper:
    """mlx-lm's tokenizer of a model folder, with the end-of-sequence ids of its configs.

    Raises:
        TokenizerError: see `Tokenizer.load`.
    """
    import mlx.core as mx  # noqa: PLC0415 - see above

    mx.set_default_device(mx.cpu)
    from mlx_lm.utils import load_config, load_tokenizer  # noqa: PLC0415 - see above
    from transformers.utils.logging import set_verbosity_error  # noqa: PLC0415 - see above

    set_verbosity_error()  # type: ignore[no-untyped-call]  # its advice is for people who call it
    try:
        config = load_config(path)
        if "model_file" in config and not trust_remote_code:
            raise TokenizerError(
                f"{path} wants its own code to be run ({config['model_file']}); "
                "set trust_remote_code = true for this model if you trust it"
            )
        wrapper: TokenizerWrapper = load_tokenizer(  # type: ignore[no-untyped-call]
            path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TokenizerError(f"cannot load the tokenizer of {path}: {error}") from error
    return wrapper


def byte_pieces(wrapper: TokenizerWrapper) -> BytePieces | None:
    """The bytes of every token, where mlx-lm found the tokenizer to be of such a kind."""
    from mlx_lm.tokenizer_utils import (  # noqa: PLC0415 - see above
        BPEStreamingDetokenizer,
        SPMStreamingDetokenizer,
    )

    kind = wrapper.detokenizer
    if isinstance(kind, BPEStreamingDetokenizer):
        return BytePieces(kind.tokenmap, byte_level_piece)
    if isinstance(kind, SPMStreamingDetokenizer):
        return BytePieces(kind.tokenmap, spm_piece)
    return None


def is_jinja(wrapper: TokenizerWrapper) -> bool:
    """Whether chats are rendered by the model's own Jinja template, in transformers' sandbox."""
    return wrapper.chat_template is not None and "chat_template_type" not in wrapper.init_kwargs


def find_markup(wrapper: TokenizerWrapper) -> Markup:
    """How the model marks reasoning and calls, as mlx-lm inferred it from its tokenizer."""
    from mlx_lm.generate import make_text_state_machine  # noqa: PLC0415 - see above

    machine: Callable[[object], Machine] = make_text_state_machine
    reasoning = _ReasoningOnly.of(wrapper)
    return Markup(
        reasoning=machine(reasoning) if reasoning.marks_anything else None,
        calls=machine(wrapper) if wrapper.has_tool_calling else None,
        parser=wrapper.tool_parser,
        takes_tools=_takes_tools(wrapper),
        opening=_Opening(wrapper) if reasoning.marks_anything else None,
        reasoning_end=tuple(wrapper.think_end_tokens or ()),
    )


@dataclass(frozen=True, slots=True)
class _ReasoningOnly:
    """What mlx-lm's machine is made of, less the tool calls."""

    has_thinking: bool
    think_start: str | None
    think_end: str | None
    structural_markers: Sequence[str]
    response_transitions: Mapping[str, Sequence[tuple[str, str]]]
    has_tool_calling: bool = False

    @classmethod
    def of(cls, wrapper: TokenizerWrapper) -> _ReasoningOnly:
        transitions = {
            part: [(marker, opens) for marker, opens in edges if opens != CALL]
            for part, edges in wrapper.response_transitions.items()
            if part != CALL
        }
        return cls(
            wrapper.has_thinking,
            wrapper.think_start,
            wrapper.think_end,
            wrapper.structural_markers,
            transitions,
        )

    @property
    def marks_anything(self) -> bool:
        return self.has_thinking or bool(self.structural_markers or self.response_transitions)


@dataclass(frozen=True, slots=True)
class _Opening:
    """See `Markup.opening`: some templates open the reasoning at the end of the prompt."""

    wrapper: TokenizerWrapper

    def __call__(self, prompt: Sequence[int]) -> str:
        if (initial := self.wrapper.response_initial_state) is not None:
            return initial
        if not self.wrapper.has_thinking:
            return CONTENT
        start = self.wrapper.rfind_think_start(prompt)  # type: ignore[no-untyped-call]
        end = self.wrapper.rfind_think_end(prompt)  # type: ignore[no-untyped-call]
        return REASONING if start > end else CONTENT


def _takes_tools(wrapper: TokenizerWrapper) -> bool:
    """Whether the chat template writes tools into the prompt: tried, as templates are programs."""
    if not wrapper.has_chat_template:
        return False
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    try:
        with_tools, without = (_probe(wrapper, offered) for offered in (tools, None))
    except Exception:  # noqa: BLE001 - whatever it raises: it does not take tools
        return False
    return with_tools != without


def _probe(wrapper: TokenizerWrapper, tools: list[dict[str, Any]] | None) -> object:
    messages = [{"role": "user", "content": "?"}]
    return wrapper.apply_chat_template(  # type: ignore[no-untyped-call]
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
