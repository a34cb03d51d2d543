"""The one path from a parsed request to its events, shared by every protocol."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from mlxd.errors import BadRequest, MlxdError
from mlxd.http.context import Record
from mlxd.http.events import Admitted, Done, Event
from mlxd.http.requests import (
    ChatPrompt,
    Limit,
    SamplingRequest,
    TextPrompt,
    TextRequest,
    TokenPrompt,
)
from mlxd.policy import request_traits
from mlxd.serving import Caller, Directory, Generation, SamplingDefaults, Served, Ticket
from mlxd.text.stream import Delta, TextStream
from mlxd.text.tokenizer import Tokenizer
from mlxd.wire import Capabilities, Sampling, Token

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed every check."""

    model: str  # its id
    tokenizer: Tokenizer
    generation: Generation
    stops: tuple[str, ...]
    drop_leading_space: bool


async def generate(
    request: TextRequest, directory: Directory, record: Record
) -> AsyncGenerator[Event, None]:
    """Admit the request and turn its tokens into events; closing it early cancels.

    Raises:
        MlxdError: whatever the directory, the gateway and its ticket raise, and
            BadRequest where the request does not fit its model.
    """
    async with _admitted(request, directory, record) as (call, ticket):
        yield Admitted(call.model, ticket.lane, ticket.reason)
        text = await _Text.open(call)
        async for tokens in ticket:
            if delta := await text.feed(tokens):
                if record.first_token is None:
                    record.first_token = asyncio.get_running_loop().time()
                yield delta
            if text.has_stopped():
                break
        if delta := await text.finish():
            yield delta
        # A stop comes before a limit, also where the engine has already reported that.
        if (count := text.stopped_at) is not None:
            ticket.end("stop", count)
        yield Done(ticket.outcome)


@asynccontextmanager
async def _admitted(
    request: TextRequest, directory: Directory, record: Record
) -> AsyncIterator[tuple[Call, Ticket]]:
    """Find the model, prepare, take a place; the record learns every fact, and at last the end."""
    async with AsyncExitStack() as entered:
        try:
            # Held until it has its place: a model that is replaced meanwhile goes on so long.
            with directory.using(request.model) as served:
                record.facts["model"] = served.id
                call = await _prepare(request, served, record.request_id, record.caller)
                ticket = await entered.enter_async_context(served.gateway.admit(call.generation))
        except MlxdError:
            record.facts["outcome"] = "rejected"
            raise
        place = entered.pop_all()
    record.facts.update(lane=ticket.lane.value, reason=ticket.reason)
    try:
        async with place:
            yield call, ticket
    finally:
        record.ended(ticket.outcome)


async def _prepare(request: TextRequest, served: Served, request_id: str, caller: Caller) -> Call:
    """Tokenise, resolve every default, check against the model.

    Raises:
        BadRequest: the prompt or a parameter does not fit this model.
    """
    capabilities = served.capabilities
    sampling = resolve_sampling(request.sampling, served.sampling, capabilities)
    _check_length(request.prompt, served)
    prompt = await _tokens(request.prompt, served.tokenizer)
    _check_prompt(prompt, request.prompt.param, capabilities)
    generation = Generation(
        request_id=request_id,
        prompt=prompt,
        max_tokens=_limit(request.limit, served.sampling, len(prompt), capabilities.context),
        eos=served.tokenizer.eos_token_ids,
        sampling=sampling,
        traits=request_traits(sampling, seed_set=request.sampling.seed is not None),
        caller=caller,
        priority=_priority(request.priority, caller),
    )
    return Call(
        model=served.id,
        tokenizer=served.tokenizer,
        generation=generation,
        stops=request.stops,
        drop_leading_space=isinstance(request.prompt, ChatPrompt),
    )


class _Text:
    """A `TextStream` used where its detokenizer belongs."""

    def __init__(self, tokenizer: Tokenizer, stream: TextStream, *, in_worker: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._in_worker = in_worker

    @classmethod
    async def open(cls, call: Call) -> _Text:
        tokenizer = call.tokenizer
        detokenizer = tokenizer.detokenizer()

        def make() -> TextStream:
            return TextStream(
                detokenizer,
                last_prompt_token=call.generation.prompt[-1],
                stops=call.stops,
                drop_leading_space=call.drop_leading_space,
            )

        in_worker = detokenizer.in_worker
        stream = await tokenizer.run(make) if in_worker else make()
        return cls(tokenizer, stream, in_worker=in_worker)

    @property
    def stopped_at(self) -> int | None:
        return self._stream.stopped_at

    def has_stopped(self) -> bool:
        return self.stopped_at is not None

    async def feed(self, tokens: Sequence[Token]) -> Delta:
        if self._in_worker:
            return await self._tokenizer.run(self._stream.feed, tokens)
        return self._stream.feed(tokens)

    async def finish(self) -> Delta:
        if self._in_worker:
            return await self._tokenizer.run(self._stream.finish)
        return self._stream.finish()


def resolve_sampling(
    asked: SamplingRequest, defaults: SamplingDefaults, capabilities: Capabilities
) -> Sampling:
    """Every parameter a number: the client's, else the model's, else the built-in one.

    Raises:
        BadRequest: a bias on a token that the model does not have.
    """
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
        repetition_penalty=asked.repetition_penalty,
        repetition_context_size=asked.repetition_context_size,
        presence_penalty=asked.presence_penalty,
        presence_context_size=asked.presence_context_size,
        frequency_penalty=asked.frequency_penalty,
        frequency_context_size=asked.frequency_context_size,
        logit_bias=dict(asked.logit_bias),
        logprobs=asked.logprobs,
    )


def _given(asked: N | None, default: N) -> N:
    return default if asked is None else asked


async def _tokens(
    prompt: ChatPrompt | TextPrompt | TokenPrompt, tokenizer: Tokenizer
) -> Sequence[int]:
    match prompt:
        case ChatPrompt():
            return await tokenizer.encode_chat(
                prompt.messages, chat_template_kwargs=prompt.template_kwargs
            )
        case TextPrompt():
            return await tokenizer.encode(prompt.text)
        case TokenPrompt():
            return prompt.tokens


def _check_length(prompt: ChatPrompt | TextPrompt | TokenPrompt, served: Served) -> None:
    """Refuse text that cannot fit before it keeps the tokenizer from everybody else."""
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
    # Such an id makes the engine read outside its embedding table.
    if min(prompt) < 0 or max(prompt) >= capabilities.vocab_size:
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
