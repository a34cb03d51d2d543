"""Prompts and sampling settings: another one for each request, the same ones in each run."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

SUBJECTS = (
    *("a steam engine", "a lighthouse", "a violin", "a glacier", "a beehive", "a tidal mill"),
    *("a printing press", "a coral reef", "a compass", "a suspension bridge", "a sourdough"),
    *("a telescope", "a windmill", "a vaccine", "a sewing machine", "a river delta", "a kiln"),
)
READERS = (
    *("a curious child", "a retired sailor", "a new colleague", "a busy engineer", "a gardener"),
    *("a history teacher", "a young musician", "a patient reader", "a visitor from abroad"),
)
PLACES = (
    *(
        "a harbour town",
        "a mountain village",
        "a large city",
        "a desert oasis",
        "an old university",
    ),
    *("a small island", "a northern forest", "a crowded market", "a quiet valley"),
)
WORDS = (
    *("the", "of", "and", "to", "in", "a", "that", "was", "with", "from", "over", "under"),
    *("water", "stone", "light", "morning", "river", "house", "garden", "winter", "paper"),
    *("music", "village", "bridge", "mountain", "people", "story", "letter", "window"),
    *("carried", "found", "opened", "walked", "remembered", "built", "turned", "waited"),
    *("small", "quiet", "bright", "early", "heavy", "distant", "simple", "old", "green"),
)


def chat_prompt(random: Random, number: int) -> str:
    """A question of about 60 tokens that asks for a long answer: about 90 with a chat template.

    Args:
        number: distinguishes it from all others from its first words on, so that no cache of
            prefixes holds more of it than the template.
    """
    subject, other = random.sample(SUBJECTS, 2)
    return (
        f"Question {number}: explain to {random.choice(READERS)} how {subject} works, and what "
        f"it has meant for {random.choice(PLACES)}. Begin with the oldest form that is known, "
        f"then compare it with {other} in {random.randint(3, 9)} points, and say what both have "
        "in common. Write at least ten full paragraphs."
    )


def long_prompt(random: Random, words: int) -> str:
    """A text of this many words to be summarised."""
    text = " ".join(random.choice(WORDS) for _ in range(words))
    return f"Summarise the following text in one long paragraph. {text}"


def greedy(_: Random) -> Mapping[str, Any]:
    """The most likely token, always."""
    return {"temperature": 0.0}


def mixed(random: Random) -> Mapping[str, Any]:
    """Temperature, top_p and top_k, as different clients send them."""
    return {**mixed_open(random), "top_k": random.randint(20, 60)}


def mixed_open(random: Random) -> Mapping[str, Any]:
    """Temperature and top_p alone, as most clients send them."""
    return {
        "temperature": round(random.uniform(0.5, 1.2), 4),
        "top_p": round(random.uniform(0.8, 0.99), 4),
    }


def wide(_: Random) -> Mapping[str, Any]:
    """Temperature and top_p as they are most often sent, the same for all."""
    return {"temperature": 0.7, "top_p": 0.95}


def penalised(random: Random) -> Mapping[str, Any]:
    """What `mixed` sends, with penalties and a bias of its own."""
    return {
        **mixed(random),
        "repetition_penalty": round(random.uniform(1.05, 1.3), 4),
        "presence_penalty": round(random.uniform(0.1, 1.0), 4),
        "frequency_penalty": round(random.uniform(0.1, 1.0), 4),
        "logit_bias": {str(random.randint(1000, 20_000)): 2.0},
    }
