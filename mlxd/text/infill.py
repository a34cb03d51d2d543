"""Fill-in-the-middle: the tokens that code models put around a gap's two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: (before the prefix, before the suffix, before the middle), as the families write them.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder  # noqa: RUF001
)


@dataclass(frozen=True, slots=True)
class Infill:
    """A model's three tokens."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> Infill | None:
        """Those of this vocabulary; None = the model fills no gaps."""
        for family in _FAMILIES:
            if all(token in vocabulary for token in family):
                return cls(*(vocabulary[token] for token in family))
        return None

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The prompt whose answer is what stands between these."""
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]
