"""Acts for the scheduler: prefill, the pools and their compiled step, the serial lane.

Everything is enqueued asynchronously; only `collect` waits, and a prefill for
the one before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxd.engine import prefill, serial
from mlxd.engine.constraint import Constraint
from mlxd.engine.loading import LoadedModel
from mlxd.engine.memory import HEADROOM, Memory, Promise
from mlxd.engine.pool import SMALLEST_CLASS, Pool, capacity_classes, class_for, columns_for
from mlxd.engine.pools import Pools
from mlxd.engine.port import NO_MEMORY, Chunk, Drawn, RowFailed, SerialSteps
from mlxd.engine.prefill import Prefilled
from mlxd.engine.prefix import PrefixCache, batched
from mlxd.engine.reuse import Reuse
from mlxd.engine.sampling import Draw, RowSampler, observe, process, sample
from mlxd.engine.seats import Part, Seat, constrained
from mlxd.engine.slots import LayerSpec
from mlxd.engine.step import Forward, forward
from mlxd.wire import BatchTuning, Submit


class Runner:
    """Fulfils the scheduler's `Runner` port with MLX."""

    def __init__(
        self, loaded: LoadedModel, tuning: BatchTuning, smallest_class: int = SMALLEST_CLASS
    ) -> None:
        """No rows, no pools.

        Args:
            smallest_class: tokens that a row of the first capacity class can have.
        """
        self._model = loaded.model
        self._make_caches = loaded.make_caches
        self._vocab_size = loaded.vocab_size
        self._constraints = loaded.constraints
        self._layout: list[LayerSpec] = loaded.layout or []
        self._classes = capacity_classes(loaded.context, smallest_class)
        #: Whether the step can be compiled; warm-up finds out.
        self.compiles = True
        # Columns read -> compiled step, which keeps a trace for every width and capacity.
        self._forward: dict[int, Forward] = {}
        self._prefilled: dict[int, Prefilled] = {}
        self._seats: dict[int, Seat] = {}
        self._pools = Pools(self._layout, self._classes, tuning.width, self._seats)
        self._enqueued: deque[list[Part]] = deque()
        self._serial: list[Any] = []  # the serial lane's caches
        self._reuse = Reuse(loaded, tuning.prefix_cache)
        self._prompts: dict[int, Sequence[int]] = {}  # of the rows in prefill
        self._memory = Memory(self._layout, self._classes)
        # On a CPU, `async_eval` returns when nearly all is computed: a step enqueued
        # ahead would only delay the tokens of the one before it.
        self.ahead = 0 if mx.default_device() == mx.Device(mx.cpu) else 1
        self._longest_padded = min((s.longest_padded for s in self._layout), default=0)

    def retune(self, tuning: BatchTuning) -> None:
        """Take a new width and a new limit of the prefix cache."""
        self._pools.width = tuning.width
        self._reuse.max_bytes = tuning.prefix_cache
        self._fits(None, [])

    # --- memory ---------------------------------------------------------------

    def limit(self, kv_bytes: int) -> None:
        """Allocate no more than this for rows and the prefix cache, from now on."""
        self._memory.limit = kv_bytes
        self._fits(None, [])

    def admits(self, tokens: int, remaining: int) -> bool:
        """Whether one more row fits in."""
        return self._fits(self._memory.promised(tokens, remaining), [])

    def can_step(self, rows: Sequence[int]) -> bool:
        """Whether the rows that fill their class can move up, and all fits the limit of today."""
        seats = [self._seats[row] for row in rows]
        full = [seat for seat in seats if seat.position >= seat.pool.capacity]
        return self._fits(None, [class_for(self._classes, seat.position + 1) for seat in full])

    def _fits(self, joining: Promise | None, crossing: Sequence[int]) -> bool:
        """Whether this fits beside what there is; the prefix cache keeps what is left over."""
        limit, pools = self._memory.limit, self._pools
        needed = self._memory.projected(pools.by_capacity, pools.width, joining, crossing)
        if needed > limit:
            pools.narrow()  # nobody waits for better times now
            needed = self._memory.projected(pools.by_capacity, pools.width, joining, crossing)
        fits = needed <= limit
        if not fits:  # what is not admitted takes nothing from the cache
            needed = self._memory.projected(pools.by_capacity, pools.width)
        self._reuse.fit(limit - needed)
        return fits

    def clear_cache(self) -> None:
        """Forget what the prefix cache holds."""
        self._reuse.clear()

    # --- prefill --------------------------------------------------------------

    def begin(self, row: int, tokens: Sequence[int], remaining: int) -> int:
        """Take what the prefix cache holds of these tokens; how many that is."""
        self._memory.promise(row, len(tokens), remaining)
        self._prompts[row] = tokens
        restored = self._reuse.restore(tokens)
        if restored is None:
            return 0
        self._prefilled[row] = restored
        return restored.length

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Enqueue these chunks, similar ones together.

        Waits for earlier chunks first, so that at most one call's work is queued.
        """
        for pending in self._prefilled.values():
            mx.eval(prefill.arrays_of(pending.caches))
        for group in prefill.groups(
            chunks, self._longest_padded, continued=PrefixCache.supports(self._layout)
        ):
            states = [self._prefilled.get(chunk.row) for chunk in group]
            done = prefill.run(self._model, group, self._together(states))
            self._prefilled.update(zip([chunk.row for chunk in group], done, strict=True))
            for chunk in group:
                if not chunk.last:
                    self._reuse.passing(self._prompts[chunk.row], self._prefilled[chunk.row])

    def _together(self, states: Sequence[Prefilled | None]) -> list[Any]:
        """The caches of a group's rows, which all hold the same number of tokens."""
        held = [state.caches for state in states if state is not None]
        if not held:
            return self._make_caches()
        return held[0] if len(held) == 1 else batched(held)

    def seat(self, row: int, request: Submit, given: Sequence[int] = ()) -> None:
        """Join a prefilled row: from the next step on it decodes."""
        context = [*request.prompt, *given]
        length = len(context)
        need = length + min(request.max_tokens - len(given), HEADROOM)
        sampler = RowSampler.of(request.sampling, self._vocab_size)
        window = min(sampler.window, length + request.max_tokens - len(given))
        constraint = self._constraint(request)
        if constraint is not None:
            constraint.follow(given)
        self._memory.settle(row)
        pool = self._pools.with_room(need)
        slot = pool.take()
        # From here on the row is released with its slot, whatever fails.
        self._seats[row] = Seat(pool, slot, length - 1, sampler, window, constraint, length)
        state = self._prefilled.pop(row, None)
        self._prompts.pop(row, None)
        if state is None:  # a prompt of one token has nothing to prefill
            pool.clear(slot)
            pool.feed(slot, mx.array(context[-1], mx.uint32))
        else:
            pool.join(slot, state.caches, state.row, state.length, context[-1])
            self._reuse.store(context, state)
        # The last token is fed to the first step, which adds it.
        pool.history.join(slot, context[max(0, length - 1 - window) : -1] if window else [])

    def _constraint(self, request: Submit) -> Constraint | None:
        """The request's grammar at its start; the daemon sends none that cannot be had."""
        text = request.sampling.grammar
        if text is None:
            return None
        if self._constraints is None:
            raise ValueError("this model has no structured output")
        return self._constraints.of(text, request.eos, after=request.sampling.grammar_after)

    def release(self, row: int) -> None:
        """Forget a row in whatever phase it is; its tokens on the way are dropped."""
        self._prefilled.pop(row, None)
        self._prompts.pop(row, None)
        self._memory.settle(row)
        seat = self._seats.pop(row, None)
        if seat is not None:
            seat.pool.free(seat.slot)

    # --- decode ---------------------------------------------------------------

    def decode(self, rows: Sequence[int]) -> None:
        """Enqueue one step of these rows, which are seated, over all their pools."""
        for row in rows:
            seat = self._seats[row]
            if seat.position >= seat.pool.capacity:
                self._pools.move_up(seat)
        parts = []
        for pool in self._pools.by_capacity.values():
            inside = [row for row in rows if self._seats[row].pool is pool]
            if inside:
                parts.append(self._step(pool, inside))
        mx.async_eval([part.arrays for part in parts])
        self._enqueued.append(parts)
        self._pools.shrink()

    def collect(self) -> list[Drawn]:
        """Wait for the oldest step on its way: a token for each row that was in it."""
        return [drawn for part in self._enqueued.popleft() for drawn in part.read()]

    def reset(self) -> None:
        """After a failed step: drop every row's state, and what is on its way."""
        self._enqueued.clear()
        self._prefilled.clear()
        self._prompts.clear()
        self._seats.clear()
        self._memory.clear()
        self._pools.clear()
        mx.clear_cache()

    def rest(self) -> None:
        """Give memory back while there is nothing to do: pools without rows go."""
        self._pools.drop_empty()
        mx.clear_cache()

    def _step(self, pool: Pool, rows: Sequence[int]) -> Part:
        """Enqueue forward and sample of one pool."""
        positions = [0] * pool.rung
        samplers: list[RowSampler | None] = [None] * pool.rung
        draws = [Draw(0.0)] * pool.rung
        for row in rows:
            seat = self._seats[row]
            positions[seat.slot] = seat.position
            samplers[seat.slot] = seat.sampler
            seat.position += 1
            draws[seat.slot] = seat.sampler.draw(seat.position)
        columns = columns_for(max(positions) + 1, pool.capacity)
        logits, arrays = self._compiled(columns)(
            pool.tokens, mx.array(positions, dtype=mx.int32), pool.arrays()
        )
        pool.adopt(arrays)
        # Here as in mlx-lm, penalties count the token that was just fed.
        pool.history.fit(max(self._seats[row].window for row in rows))
        pool.history.push(pool.tokens)
        logits = process(logits, pool.history.tokens, samplers, [p + 1 for p in positions])
        seats = {row: self._seats[row] for row in rows}
        logits, errors = constrained(logits, pool.tokens, seats)
        pool.tokens = sample(logits, samplers, draws)
        slots = {row: seat.slot for row, seat in seats.items()}
        return Part(slots, pool.tokens, observe(logits, pool.tokens, samplers), errors)

    def _compiled(self, columns: int) -> Forward:
        """The forward pass that reads `columns` columns, compiled once per shape."""
        if columns not in self._forward:
            step = forward(self._model, self._layout, self._vocab_size, columns)
            self._forward[columns] = mx.compile(step) if self.compiles else step
        return self._forward[columns]

    @property
    def keeps_prefixes(self) -> bool:
        """Whether there is a prefix cache, with room for anything."""
        return self._reuse.has_room

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pools and of all states outside one; the prefix cache is not in it."""
        prefilled = sum(state.nbytes for state in self._prefilled.values())
        return (
            self._pools.nbytes + prefilled + sum(a.nbytes for a in prefill.arrays_of(self._serial))
        )

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the prefix cache."""
        return self._reuse.nbytes

    @property
    def peak_bytes(self) -> int:
        """The most that MLX has held at any one time."""
        return mx.get_peak_memory()

    @property
    def row_bytes(self) -> list[tuple[int, int]]:
        """Every capacity class: tokens that a row in it can have, and the bytes of its slot."""
        return self._memory.classes()

    # --- serial lane ----------------------------------------------------------

    def serial(self, request: Submit, chunk: int) -> SerialSteps:
        """Run one request alone through mlx-lm's generator; None after each prefill chunk."""
        self.rest()
        state = self._memory.state(len(request.prompt) + request.max_tokens)
        if not self._fits(Promise(None, state), []):
            raise RowFailed(NO_MEMORY)
        self._serial = self._make_caches()
        try:
            constraint = self._constraint(request)
            yield from serial.generate(
                self._model, self._vocab_size, request, chunk, self._serial, constraint
            )
        finally:
            self._serial = []
