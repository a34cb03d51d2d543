"""Rows that follow a grammar, in both lanes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxd.engine.constraint import Constraint, Constraints, constrain
from mlxd.engine.loading import LoadedModel
from mlxd.engine.scheduler import FAILED_STEPS
from mlxd.grammar import of_schema
from mlxd.wire import FinishReason, Lane, Sampling
from tests.engine.tiny import VOCAB, Engine, full, loaded, prompt

EOS = 96
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "even": {"type": "boolean"}},
    "required": ["name", "even"],
    "additionalProperties": False,
}
GRAMMAR = of_schema(SCHEMA, "schema")


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Constraints:
    """Of a tokenizer of ASCII's printable characters, a line end, and EOS."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = {chr(0x120) if code == 32 else chr(code): code - 32 for code in range(32, 127)}
    pieces[chr(0x10A)] = 95
    pieces["<eos>"] = EOS
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    made = Constraints.of_folder(folder, VOCAB)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def model(constraints: Constraints) -> LoadedModel:
    """A tiny model with that tokenizer."""
    return loaded(full(), constraints=constraints)


def text(tokens: list[int]) -> str:
    """What the tokens stand for."""
    return "".join("\n" if token == 95 else chr(token + 32) for token in tokens)


def tokens(written: str) -> list[int]:
    """The tokens of a text."""
    return [ord(character) - 32 for character in written]


def next_of(constraint: Constraint) -> set[int]:
    """Which tokens may come next."""
    bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


class TestConstraint:
    """Where a row stands."""

    def test_the_request_says_which_tokens_end_it(self, constraints: Constraints) -> None:
        """They are possible where the document is complete, and nothing else is."""
        constraint = constraints.of(GRAMMAR, [EOS, 3])
        for token in tokens('{"name":"ab","even":true'):
            assert token in next_of(constraint)
            assert EOS not in next_of(constraint)
            constraint.advance(token)
        constraint.advance(tokens("}")[0])
        assert next_of(constraint) == {EOS, 3}
        constraint.advance(EOS)
        assert next_of(constraint) == {EOS, 3}
        assert constraint.error is None

    def test_it_can_be_led_anywhere_whatever_it_saw_before(self, constraints: Constraints) -> None:
        """As a processor it is a function of the tokens alone, drafts that are rejected too."""
        constraint = constraints.of(GRAMMAR, [EOS])
        fresh = constraints.of(GRAMMAR, [EOS])
        for written in ('{"na', '{"name":"x', '{"name":"yz","ev', "", '{"name":""'):
            constraint.follow(tokens(written))
            fresh = constraints.of(GRAMMAR, [EOS])
            for token in tokens(written):
                fresh.advance(token)
            assert next_of(constraint) == next_of(fresh)

    def test_it_begins_behind_the_end_of_the_reasoning(self, constraints: Constraints) -> None:
        """Anything may come before, but the answer's end; going back leads out of it again."""
        constraint = constraints.of(GRAMMAR, [EOS], after=tokens("=>"))
        free = set(range(32 * -(-VOCAB // 32))) - {EOS}
        for written in ("", "{{=", '{{=>{"name":"x', "a{", "=>", '=>{"nam', "=x", "=>=>"):
            constraint.follow(tokens(written))
            _thought, begun, document = written.partition("=>")
            expected = constraints.of(GRAMMAR, [EOS])
            expected.follow(tokens(document))
            assert (constraint.error is None) == (expected.error is None)
            if not begun:
                assert next_of(constraint) >= free & set(range(VOCAB))
                assert EOS not in next_of(constraint)
            elif expected.error is None:
                assert next_of(constraint) == next_of(expected)

    def test_a_token_that_the_grammar_forbids_is_an_error_that_stays(
        self, constraints: Constraints
    ) -> None:
        """The row ends with it."""
        constraint = constraints.of(GRAMMAR, [EOS])
        constraint.advance(tokens("x")[0])
        assert constraint.error is not None
        assert len(next_of(constraint)) >= VOCAB

    def test_only_rows_with_a_grammar_are_touched(self, constraints: Constraints) -> None:
        """Others keep their logits bit for bit; so do allowed tokens."""
        logits = mx.random.normal((3, VOCAB), key=mx.random.key(1))
        found = constrain(logits, {1: constraints.of(GRAMMAR, [EOS])})
        assert mx.array_equal(found[0], logits[0])
        assert mx.array_equal(found[2], logits[2])
        possible = np.flatnonzero(np.isfinite(np.array(found[1])))
        assert set(possible.tolist()) == set(tokens("{"))
        assert found[1, tokens("{")[0]].item() == logits[1, tokens("{")[0]].item()

    def test_a_folder_without_a_tokenizer_json_has_none(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The log says so; so it does of a broken one."""
        assert Constraints.of_folder(tmp_path, VOCAB) is None
        (tmp_path / "tokenizer.json").write_text("{}")
        assert Constraints.of_folder(tmp_path, VOCAB) is None
        assert capsys.readouterr().err.count("no structured output") == 2


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=0, temperature=0.0, grammar=GRAMMAR),
        Sampling(seed=1, temperature=1.5, grammar=GRAMMAR),
        Sampling(seed=2, top_k=50, grammar=GRAMMAR, repetition_penalty=1.5),
        Sampling(seed=3, temperature=2.0, top_p=0.9, grammar=GRAMMAR, logprobs=3),
        Sampling(seed=4, xtc_probability=1.0, xtc_threshold=0.01, grammar=GRAMMAR),
    ],
    ids=["greedy", "wide", "narrow", "nucleus", "xtc"],
)
def test_the_answer_is_a_document_of_the_schema(
    model: LoadedModel, lane: Lane, sampling: Sampling
) -> None:
    """Whatever a model with random weights would say, in either lane."""
    engine = Engine(model)
    engine.submit(0, prompt(20, 1), 400, sampling=sampling, lane=lane, eos=[EOS])
    engine.run()
    assert engine.finished[0].reason is FinishReason.STOP
    document = json.loads(text(engine.tokens[0]))
    assert set(document) == {"name", "even"}
    assert isinstance(document["even"], bool)
    told = [p for entry in engine.logprobs[0] if entry is not None for _token, p in entry.top]
    assert all(math.isfinite(logprob) for logprob in told), "forbidden tokens are not among them"


def test_rows_with_and_without_grammars_run_together_as_they_do_alone(model: LoadedModel) -> None:
    """Each equals itself in the serial lane; the limit may cut a document."""
    kinds = [
        Sampling(seed=number, temperature=1.0, grammar=GRAMMAR if number % 2 else None, logprobs=2)
        for number in range(6)
    ]
    batch, serial = Engine(model, width=4), Engine(model)
    for number, sampling in enumerate(kinds):
        for engine, lane in ((batch, Lane.BATCH), (serial, Lane.SERIAL)):
            engine.submit(
                number, prompt(10 + number, number), 12, sampling=sampling, lane=lane, eos=[EOS]
            )
        batch.step()
    batch.run()
    serial.run()
    assert batch.tokens == serial.tokens
    assert all(text(batch.tokens[number]).startswith("{") for number in (1, 3, 5))
    assert {batch.finished[n].reason for n in (1, 3, 5)} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_both_lanes_think_before_the_grammar_begins(model: LoadedModel) -> None:
    """The same thoughts, and then the same document."""
    end = tokens("~")
    bias = {end[0]: 4.0}  # so that it comes soon
    sampling = Sampling(
        seed=3, temperature=1.0, grammar=GRAMMAR, grammar_after=end, logit_bias=bias, logprobs=0
    )
    batch, serial = Engine(model, width=4), Engine(model)
    for engine, lane in ((batch, Lane.BATCH), (serial, Lane.SERIAL)):
        engine.submit(0, prompt(10, 3), 200, sampling=sampling, lane=lane, eos=[EOS])
        engine.run()
    assert batch.tokens == serial.tokens
    thought, _end, document = text(batch.tokens[0]).partition("~")
    assert thought
    assert set(json.loads(document)) == {"name", "even"}
    assert batch.finished[0].reason is serial.finished[0].reason is FinishReason.STOP


def test_a_grammar_that_cannot_be_built_fails_its_own_row_only(model: LoadedModel) -> None:
    """The daemon checks grammars, but nobody else depends on that, nor does the engine's life."""
    engine = Engine(model)
    broken = Sampling(seed=0, temperature=0.0, grammar="start: undefined_rule")
    engine.submit(0, prompt(5, 0), 20)
    engine.submit(1, prompt(5, 1), 20, sampling=broken, eos=[EOS])
    for number in range(2, 2 + FAILED_STEPS):
        engine.submit(number, prompt(5, 1), 20, sampling=broken, lane=Lane.SERIAL, eos=[EOS])
    engine.run()
    assert not engine.scheduler.broken
    assert engine.finished[0].reason is FinishReason.LENGTH
    for number in range(1, 2 + FAILED_STEPS):
        assert engine.finished[number].reason is FinishReason.FORMAT
        assert "response format" in (engine.finished[number].error or "")
