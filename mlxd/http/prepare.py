"""From a parsed request to generations that fit their model, or a refusal."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from mlxd.errors import BadRequest
from mlxd.grammar import of_schema
from mlxd.http.inwords import in_words
from mlxd.http.requests import (
    ChatPrompt,
    JsonFormat,
    Limit,
    Prompt,
    SamplingRequest,
    TextPrompt,
    TextRequest,
    TokenPrompt,
)
from mlxd.policy import request_traits
from mlxd.serving import Caller, Generation, SamplingDefaults, Served
from mlxd.text.markup import CONTENT, REASONING
from mlxd.text.tokenizer import Tokenizer
from mlxd.wire import Capabilities, Sampling

N = TypeVar("N", int, float)

NO_THINKING = {"enable_thinking": False}


@dataclass(frozen=True, slots=True)
class Call:
    """One generation that passed every check, and how its text is made."""

    tokenizer: Tokenizer
    generation: Generation
    stops: tuple[str, ...]
    chat: bool  # else a completion: all of its text is content
    continues: bool  # it goes on in the middle of a text
    opening: str  # the part in which it begins, of `mlxd.text.markup`
    enforced: bool  # it follows a grammar
    tools: tuple[Mapping[str, Any], ...]
    must_call: bool
    one_call: bool
    echo: str  # what the answer begins with


async def prepare(
    request: TextRequest, served: Served, request_id: str, caller: Caller
) -> list[Call]:
    """Tokenise, resolve every default, check against the model.

    Returns:
        As many as the request wants answers to all of its prompts, those of one
        prompt side by side.

    Raises:
        BadRequest: a prompt or a parameter does not fit this model.
    """
    grammar = await _grammar(request.format, served.capabilities)
    sampling = resolve_sampling(request.sampling, served, grammar)
    calls: list[Call] = []
    for prompt in request.prompts:
        tokens = await prompt_tokens(prompt, served)
        _check_prompt(tokens, prompt.param, served.capabilities)
        echo = await _prompt_text(prompt, tokens, served.tokenizer) if request.echo else ""
        opening = CONTENT
        if isinstance(prompt, ChatPrompt):
            opening = await served.tokenizer.opening(tokens)
        after = _grammar_after(request.format, opening, served.tokenizer)
        own = msgspec.structs.replace(sampling, grammar_after=after)
        for _ in range(request.answers):
            number = len(calls)
            generation = Generation(
                request_id=request_id if number == 0 else f"{request_id}-{number}",
                prompt=tokens,
                max_tokens=_limit(
                    request.limit, served.sampling, len(tokens), served.capabilities.context
                ),
                eos=served.tokenizer.eos_token_ids,
                # Each answer its own random stream, all told by the one seed.
                sampling=_own_seed(own, number),
                traits=request_traits(sampling, seed_set=request.sampling.seed is not None),
                caller=caller,
                priority=_priority(request.priority, caller),
            )
            calls.append(
                Call(
                    tokenizer=served.tokenizer,
                    generation=generation,
                    stops=request.stops,
                    chat=isinstance(prompt, ChatPrompt),
                    continues=isinstance(prompt, ChatPrompt) and prompt.continues,
                    opening=opening,
                    enforced=request.format is not None,
                    tools=prompt.tools if isinstance(prompt, ChatPrompt) else (),
                    must_call=isinstance(prompt, ChatPrompt) and prompt.must_call,
                    one_call=request.one_call,
                    echo=echo,
                )
            )
    return calls


def resolve_sampling(asked: SamplingRequest, served: Served, grammar: str | None) -> Sampling:
    """Every parameter a number: the client's, else the model's, else the built-in one.

    Raises:
        BadRequest: a bias on a token that the model does not have.
    """
    capabilities, defaults, tokenizer = served.capabilities, served.sampling, served.tokenizer
    for token in asked.logit_bias:
        if not 0 <= token < capabilities.vocab_size:
            raise BadRequest(
                f"logit_bias: {token} is not a token id; this model has "
                f"{capabilities.vocab_size} tokens",
                param="logit_bias",
            )
    top_k = _given(asked.top_k, defaults.top_k)
    return Sampling(
        seed=secrets.randbits(64) if asked.seed is None else asked.seed,
        temperature=_given(asked.temperature, defaults.temperature),
        top_p=_given(asked.top_p, defaults.top_p),
        top_k=top_k if top_k < capabilities.vocab_size else 0,
        min_p=_given(asked.min_p, defaults.min_p),
        xtc_probability=asked.xtc_probability,
        xtc_threshold=asked.xtc_threshold,
        # As in mlx-lm's server: without them an answer would not end, nor a line.
        xtc_special=[*tokenizer.newline, *tokenizer.eos_token_ids] if asked.xtc_probability else [],
        repetition_penalty=asked.repetition_penalty,
        repetition_context_size=asked.repetition_context_size,
        presence_penalty=asked.presence_penalty,
        presence_context_size=asked.presence_context_size,
        frequency_penalty=asked.frequency_penalty,
        frequency_context_size=asked.frequency_context_size,
        logit_bias=dict(asked.logit_bias),
        logprobs=asked.logprobs,
        grammar=grammar,
    )


def _given(asked: N | None, default: N) -> N:
    return default if asked is None else asked


def _own_seed(sampling: Sampling, number: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**64)


async def _grammar(asked: JsonFormat | None, capabilities: Capabilities) -> str | None:
    """The grammar of an enforced format, off the event loop: a schema can be large.

    Raises:
        BadRequest: the schema cannot be used, or no format can be enforced here.
    """
    if asked is None:
        return None
    if not capabilities.structured:
        raise BadRequest(
            "this model's tokenizer does not allow an enforced response format", param=asked.param
        )
    return await asyncio.to_thread(of_schema, asked.schema, asked.param)


def _grammar_after(asked: JsonFormat | None, opening: str, tokenizer: Tokenizer) -> list[int]:
    """Where a grammar begins: behind the reasoning that the prompt has opened.

    Raises:
        BadRequest: the prompt has opened a part whose end this model does not mark.
    """
    if asked is None or opening == CONTENT:
        return []
    if opening != REASONING or not tokenizer.markup.reasoning_end:
        raise BadRequest(
            "this model's answers begin with a part of their own, behind which no format can "
            "be enforced",
            param=asked.param,
        )
    return list(tokenizer.markup.reasoning_end)


async def prompt_tokens(prompt: Prompt, served: Served) -> Sequence[int]:
    """A prompt's tokens, however many they are.

    Raises:
        BadRequest: the prompt is not for this model.
    """
    check_length(prompt, served)
    tokenizer = served.tokenizer
    match prompt:
        case ChatPrompt():
            prompt = _for_template(prompt, tokenizer)
            return await tokenizer.encode_chat(
                prompt.messages,
                tools=prompt.tools,
                chat_template_kwargs=prompt.template_kwargs,
                continues=prompt.continues,
            )
        case TextPrompt() if prompt.suffix:
            return await _gap(prompt, tokenizer)
        case TextPrompt():
            return await tokenizer.encode(prompt.text)
        case TokenPrompt():
            return prompt.tokens


async def _gap(prompt: TextPrompt, tokenizer: Tokenizer) -> Sequence[int]:
    if tokenizer.infill is None:
        raise BadRequest(
            "this model has no tokens for filling gaps", param="suffix", code="suffix_not_supported"
        )
    return tokenizer.infill.prompt(
        await tokenizer.encode(prompt.text, add_special_tokens=False),
        await tokenizer.encode(prompt.suffix, add_special_tokens=False),
    )


async def _prompt_text(prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """What an echo shows: the client's own text, where it sent text."""
    return prompt.text if isinstance(prompt, TextPrompt) else await tokenizer.decode(tokens)


def _for_template(prompt: ChatPrompt, tokenizer: Tokenizer) -> ChatPrompt:
    """The prompt in what its model's template knows."""
    if prompt.must_call:  # from the first token on: there is no room for thoughts
        prompt = replace(prompt, template_kwargs={**prompt.template_kwargs, **NO_THINKING})
    if tokenizer.markup.takes_tools:
        return prompt
    if prompt.tools and not prompt.must_call:
        raise BadRequest(
            "this model cannot call tools: its chat template does not show them to it; "
            "only a tool_choice that requires a call can be had",
            param="tools",
            code="tools_not_supported",
        )
    return replace(prompt, messages=in_words(prompt.messages, prompt.tools), tools=())


def check_length(prompt: Prompt, served: Served) -> None:
    """Refuse text that cannot fit before it keeps the tokenizer from everybody else.

    Raises:
        BadRequest: no tokenizing of it fits the context.
    """
    if isinstance(prompt, TokenPrompt):
        return
    context = served.capabilities.context
    if prompt.characters > context * served.tokenizer.longest:
        raise BadRequest(
            f"{prompt.param} has {prompt.characters} characters, too many for this model's "
            f"context of {context} tokens",
            param=prompt.param,
            code="context_length_exceeded",
        )


def _check_prompt(prompt: Sequence[int], param: str, capabilities: Capabilities) -> None:
    if not prompt:
        raise BadRequest("the prompt has no tokens", param=param)
    if len(prompt) >= capabilities.context:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens; this model's context is "
            f"{capabilities.context} tokens, the answer included",
            param=param,
            code="context_length_exceeded",
        )
    check_tokens(prompt, param, capabilities)


def check_tokens(tokens: Sequence[int], param: str, capabilities: Capabilities) -> None:
    """Refuse ids that the model does not have. Raises BadRequest."""
    # Such an id makes the engine read outside its embedding table.
    if tokens and (min(tokens) < 0 or max(tokens) >= capabilities.vocab_size):
        raise BadRequest(
            f"{param} holds ids that are not below {capabilities.vocab_size}, "
            "the number of this model's tokens",
            param=param,
        )


def _priority(asked: int, caller: Caller) -> int:
    if asked > caller.max_priority:
        raise BadRequest(
            f"priority is {asked}; this API key allows up to {caller.max_priority}",
            param="priority",
        )
    return asked


def _limit(asked: Limit | None, defaults: SamplingDefaults, prompt: int, context: int) -> int:
    """The token limit, clamped to what the prompt leaves of the context."""
    if asked is None:
        return min(defaults.max_tokens, context - prompt)
    if asked.tokens > context:
        raise BadRequest(
            f"{asked.param} is {asked.tokens}; this model's context is {context} tokens",
            param=asked.param,
        )
    return min(asked.tokens, context - prompt)
