"""The texts of studies: as tokens, which are characters or words, and cut into windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.studies.data import read_packed, read_text

FABLES = slice(16_590, 154_284)
"""Where the fables are in aesop.txt; a preface stands before them, advertisements after."""
UNKNOWN, LINE_END = "<unk>", "<eos>"
HELD_OUT = 10
"""One part in so many of a text that comes as one file is the test part: the last one."""


def visible(token: str) -> str:
    """A token as a name: what would be blank is a sign.

    >>> visible(" "), visible("\\n"), visible("wolf")
    ('␣', '⏎', 'wolf')
    """
    return token.translate({ord(" "): "␣", ord("\n"): "⏎", ord("\t"): "⇥"})


@dataclass(frozen=True)
class Corpus:
    """A text as numbers of tokens.

    >>> corpus = characters("abca")
    >>> corpus.tokens.tolist(), corpus.vocabulary, corpus.written(corpus.tokens[1:3])
    ([0, 1, 2, 0], ('a', 'b', 'c'), 'bc')
    """

    tokens: Tensor
    """(n,): the places of tokens in the vocabulary."""
    vocabulary: tuple[str, ...]
    between: str = ""
    """What stands between two tokens: nothing for characters, a space for words."""

    def __len__(self) -> int:
        return len(self.tokens)

    def written(self, tokens: Tensor) -> str:
        """Some tokens as text."""
        return self.between.join(self.vocabulary[token] for token in tokens.tolist())

    def part(self, start: int, stop: int) -> Corpus:
        """The tokens from one place to another."""
        return replace(self, tokens=self.tokens[start:stop])


def characters(text: str) -> Corpus:
    """A text as characters; its vocabulary is what occurs in it, sorted."""
    vocabulary = sorted(set(text))
    places = {character: at for at, character in enumerate(vocabulary)}
    return Corpus(torch.tensor([places[one] for one in text]), tuple(vocabulary))


def known_words(words: Sequence[str], most: int) -> tuple[str, ...]:
    """The vocabulary of so many words at most: the most frequent ones, and one for all others.

    >>> known_words("the wolf and the lamb and the wolf".split(), 3)
    ('<unk>', 'the', 'wolf')
    """
    others = [word for word, _ in Counter(words).most_common(most) if word != UNKNOWN]
    return (UNKNOWN, *others[: most - 1])


def as_words(words: Sequence[str], vocabulary: tuple[str, ...]) -> Corpus:
    """Words in a vocabulary; those that are not in it count as unknown.

    >>> corpus = as_words(["the", "fox"], ("<unk>", "the"))
    >>> corpus.written(corpus.tokens)
    'the <unk>'
    """
    places = {word: at for at, word in enumerate(vocabulary)}
    return Corpus(torch.tensor([places.get(word, 0) for word in words]), vocabulary, " ")


def load_fables(data: Path, most: int | None = None) -> tuple[Corpus, Corpus]:
    """Aesop's fables as characters: the training part, which is their beginning, and the rest."""
    text = read_text(data, "aesop.txt")
    if len(text) < FABLES.stop:
        raise ReadingError(
            f"'{data / 'text' / 'aesop.txt'}' has {len(text):,} characters, and the fables are "
            f"those from {FABLES.start:,} to {FABLES.stop:,}; give number 49010 of Project "
            "Gutenberg without its header."
        )
    return _in_two(characters(text[FABLES]))


def load_shakespeare(data: Path, most: int | None = None) -> tuple[Corpus, Corpus]:
    """Tiny Shakespeare as characters: the training part, and the last tenth."""
    return _in_two(characters(read_text(data, "tinyshakespeare.txt")))


def load_wikitext(data: Path, most: int | None = None) -> tuple[Corpus, Corpus]:
    """WikiText-2 as words: its training and test parts.

    Args:
        most: how many words the vocabulary has; by default all of the training part.
    """
    train, test = (_words(data, f"wikitext2.{part}.tokens") for part in ("train", "test"))
    vocabulary = known_words(train, most or len(train))
    return as_words(train, vocabulary), as_words(test, vocabulary)


LOADERS: dict[str, Callable[[Path, int | None], tuple[Corpus, Corpus]]] = {
    "fables": load_fables,
    "wikitext": load_wikitext,
    "shakespeare": load_shakespeare,
}


def _words(data: Path, name: str) -> list[str]:
    lines = read_packed(data / "text", name).decode("utf-8").splitlines()
    words = [word for line in lines for word in [*line.split(), LINE_END]]
    if not words:
        raise ReadingError(f"'{data / 'text' / name}' has no words.")
    return words


def _in_two(corpus: Corpus) -> tuple[Corpus, Corpus]:
    cut = len(corpus) - len(corpus) // HELD_OUT
    return corpus.part(0, cut), corpus.part(cut, len(corpus))


@dataclass(frozen=True)
class Windows:
    """A text in windows of equal length, numbered in its order; each token foretells the next.

    >>> windows = Windows(characters("abcdefg").tokens, 3)
    >>> len(windows), windows.inputs([1]).tolist(), windows.targets([1]).tolist()
    (2, [[3, 4, 5]], [[4, 5, 6]])
    """

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def inputs(self, ids: Sequence[int] | Tensor) -> Tensor:
        """(windows, length): what is read."""
        return self.tokens[self._places(ids)]

    def targets(self, ids: Sequence[int] | Tensor) -> Tensor:
        """(windows, length): what follows each token."""
        return self.tokens[self._places(ids) + 1]

    def _places(self, ids: Sequence[int] | Tensor) -> Tensor:
        first = torch.as_tensor(ids).long() * self.length
        return first[:, None] + torch.arange(self.length)
