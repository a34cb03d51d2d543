"""The one path from a parsed request to its events, shared by every protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from mlxd.errors import MlxdError
from mlxd.http.buffered import merged
from mlxd.http.context import Record
from mlxd.http.events import Admitted, Done, Ended, Event, Said, Usage
from mlxd.http.prepare import Call, prepare
from mlxd.http.requests import TextRequest
from mlxd.serving import Directory, Ticket
from mlxd.text.answer import AnswerStream, Apart
from mlxd.text.barecalls import BareCalls
from mlxd.text.markup import CONTENT, Parts
from mlxd.text.pieces import Delta, Piece
from mlxd.text.stream import TextStream
from mlxd.text.tokenizer import Tokenizer
from mlxd.wire import Token


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a request got its places."""

    model: str
    runs: list[tuple[Call, Ticket]]


async def generate(
    request: TextRequest, directory: Directory, record: Record
) -> AsyncGenerator[Event, None]:
    """Admit the request and turn its tokens into events; closing it early cancels.

    Raises:
        MlxdError: whatever the directory, the gateway and its tickets raise, and
            BadRequest where the request does not fit its model.
    """
    async with _admitted(request, directory, record) as admission:
        first = admission.runs[0][1]
        prompts = admission.runs[:: request.answers]
        prompt_tokens = sum(len(call.generation.prompt) for call, _ticket in prompts)
        yield Admitted(admission.model, first.lane, first.reason, prompt_tokens)
        answers = [
            _answer(index, call, ticket, record)
            for index, (call, ticket) in enumerate(admission.runs)
        ]
        thought = 0
        async with aclosing(merged(*answers)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    thought += event.reasoning_tokens
                yield event
        outcomes = [ticket.outcome for _call, ticket in admission.runs]
        yield Done(Usage.of(outcomes, request.answers, reasoning_tokens=thought))


@asynccontextmanager
async def _admitted(
    request: TextRequest, directory: Directory, record: Record
) -> AsyncIterator[Admission]:
    """Find the model, prepare, take places; the record learns every fact, and at last the end."""
    async with AsyncExitStack() as entered:
        try:
            # Held until it has its places: a model that is replaced meanwhile goes on so long.
            with directory.using(request.model) as served:
                record.facts["model"] = served.id
                calls = await prepare(request, served, record.request_id, record.caller)
                runs = [
                    (call, await entered.enter_async_context(served.gateway.admit(call.generation)))
                    for call in calls
                ]
        except MlxdError:
            record.facts["outcome"] = "rejected"
            raise
        places = entered.pop_all()
    record.facts.update(lane=runs[0][1].lane.value, reason=runs[0][1].reason)
    try:
        async with places:
            yield Admission(served.id, runs)
    finally:
        record.ended([ticket.outcome for _call, ticket in runs], request.answers)


async def _answer(
    index: int, call: Call, ticket: Ticket, record: Record
) -> AsyncGenerator[Event, None]:
    """The events of one answer."""
    if call.echo:
        yield Said(index, Delta(call.echo))
    text = await _Text.open(call)
    async for tokens in ticket:
        for piece in await text.feed(tokens):
            if record.first_token is None:
                record.first_token = asyncio.get_running_loop().time()
            yield Said(index, piece)
        if text.answer.ended_at is not None:
            break
    cut = text.answer.ended_at is None and ticket.outcome.finish_reason != "stop"
    for piece in await text.finish(cut=cut):
        yield Said(index, piece)
    _settle(text.answer, ticket)
    reason = ticket.outcome.finish_reason
    yield Ended(index, reason, text.answer.stop, text.answer.reasoning_tokens)


def _settle(answer: AnswerStream, ticket: Ticket) -> None:
    """Tell the ticket of an end that only the text shows."""
    own = "tool_calls" if answer.has_called else "stop"
    # A stop comes before a limit, also where the engine has already reported that.
    if answer.ended_at is not None:
        ticket.end(own, answer.ended_at)
    elif answer.has_called and ticket.outcome.finish_reason == "stop":
        ticket.end(own, ticket.outcome.completion_tokens)


def _apart(call: Call) -> Apart | None:
    """What takes this answer apart; None = all of it is content."""
    markup = call.tokenizer.markup
    if not call.chat or (call.enforced and call.opening == CONTENT):
        # An enforced document has no markup, whatever its strings look like.
        return BareCalls(None, call.tools) if call.must_call else None
    machine = markup.machine(with_calls=bool(call.tools) and not call.enforced)
    parts = None if machine is None else Parts(markup, machine, call.tools, call.opening)
    # Models whose calls mlx-lm does not know write them as bare JSON, as far as they do at all.
    is_bare = call.must_call or (bool(call.tools) and not call.enforced and markup.calls is None)
    return BareCalls(parts, call.tools) if is_bare else parts


class _Text:
    """An `AnswerStream` used where its detokenizer belongs."""

    def __init__(self, tokenizer: Tokenizer, answer: AnswerStream, *, in_worker: bool) -> None:
        self._tokenizer = tokenizer
        self._in_worker = in_worker
        self.answer = answer

    @classmethod
    async def open(cls, call: Call) -> _Text:
        tokenizer, detokenizer = call.tokenizer, call.tokenizer.detokenizer()

        def make() -> AnswerStream:
            stream = TextStream(
                detokenizer,
                last_prompt_token=call.generation.prompt[-1],
                stops=call.stops,
                drop_leading_space=call.chat and not call.continues,
            )
            return AnswerStream(stream, _apart(call), one_call=call.one_call)

        in_worker = detokenizer.in_worker
        answer = await tokenizer.run(make) if in_worker else make()
        return cls(tokenizer, answer, in_worker=in_worker)

    async def feed(self, tokens: Sequence[Token]) -> list[Piece]:
        if self._in_worker:
            return await self._tokenizer.run(self.answer.feed, tokens)
        return self.answer.feed(tokens)

    async def finish(self, *, cut: bool) -> list[Piece]:
        if self._in_worker:
            return await self._tokenizer.run(self.answer.finish, cut=cut)
        return self.answer.finish(cut=cut)
