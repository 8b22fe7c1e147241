"""Symbolic Raven's matrices: eight panels are seen, and the ninth is told.

A panel has some features, each a number below 8. Along every row of three panels a feature follows
a rule. Who solves the puzzle has to find out, too, which feature of a panel belongs to which of the
next one: each column of panels shows its features in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations_with_replacement, permutations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from dualform.errors import EvaluationError
from dualform.studies.hypernetwork.answers import answer_counts
from dualform.studies.hypernetwork.problems import Problems, random_stream, require_part, split

VALUES = 8
"""How many values a feature can have; sums are modulo it."""
MOST_FEATURES = 4
"""Of a panel."""
SIDE = 3
"""Rows and columns of panels."""


def _constant(first: Tensor, _second: Tensor, _three: Tensor) -> Tensor:
    return first[..., None].expand(*first.shape, SIDE)


def _progression(first: Tensor, _second: Tensor, _three: Tensor, step: int) -> Tensor:
    return (first[..., None] + step * torch.arange(SIDE)) % VALUES


def _arithmetic(first: Tensor, second: Tensor, _three: Tensor, sign: int) -> Tensor:
    return torch.stack([first, second, (first + sign * second) % VALUES], -1)


def _distribute_three(_first: Tensor, _second: Tensor, three: Tensor) -> Tensor:
    return three


Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(…, rows, columns) of two numbers a row (…, rows), and of three in some order, one a column."""
RULES: dict[str, Rule] = {
    "constant": _constant,
    "+1": partial(_progression, step=1),
    "+2": partial(_progression, step=2),
    "-1": partial(_progression, step=-1),
    "-2": partial(_progression, step=-2),
    "sum": partial(_arithmetic, sign=1),
    "difference": partial(_arithmetic, sign=-1),
    "distribute three": _distribute_three,
}
"""All rules: three values are distributed over each row in an order of the row's own."""


@dataclass(frozen=True)
class Raven:
    """Puzzles with one rule for each feature; combinations of rules, and orders, are held out.

    Parts: "train" and "test" share their rules and orders; "rules" has combinations of rules that
    training does not have; "permutations" has orders of the columns that it does not have.

    >>> task = Raven()
    >>> len(task.combinations("train")), len(task.combinations("rules"))
    (248, 82)
    >>> len(task.alignments("train")), len(task.alignments("permutations"))
    (432, 144)
    >>> problems = task.draw("test", 5, random_stream(0, "example"))
    >>> problems.x.shape, problems.y.shape            # one token for each feature of each panel
    (torch.Size([5, 36, 8]), torch.Size([5, 4]))
    """

    features: int = 4
    held_out: float = 0.25
    """The share of combinations of rules that are held out, and of alignments of columns."""
    unambiguous: bool = True
    """Whether problems are left out for which several answers agree with the panels that are seen;
    never in training."""
    seed: int = 0

    parts = ("train", "test", "rules", "permutations")
    name = "raven"
    rule_count = len(RULES)
    has_places = True

    def __post_init__(self) -> None:
        if not 1 <= self.features <= MOST_FEATURES:
            raise EvaluationError(
                f"features={self.features}, and a panel has 1 to {MOST_FEATURES}: more have too "
                "many orders to look at all of them."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Tokens, numbers of a token, tokens that are asked, and numbers of an answer.

        >>> Raven(features=2).shape
        (18, 8, 2, 8)
        """
        return SIDE * SIDE * self.features, VALUES, self.features, VALUES

    @cached_property
    def _parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Combinations and alignments of each part."""
        stream = random_stream(self.seed, "split")
        every = torch.tensor(
            list(combinations_with_replacement(range(self.rule_count), self.features))
        )
        orders = list(permutations(range(self.features)))
        pairs = torch.tensor([(one, other) for one in orders for other in orders])
        rules, new_rules = split(len(every), self.held_out, stream)
        aligned, newly_aligned = split(len(pairs), self.held_out, stream)
        found = [(rules, aligned), (rules, aligned), (new_rules, aligned), (rules, newly_aligned)]
        return {
            part: (every[some], pairs[others])
            for part, (some, others) in zip(self.parts, found, strict=True)
        }

    def combinations(self, part: str) -> Tensor:
        """(combinations, features): the numbers of rules that are together in a puzzle of a part.

        >>> Raven(features=1).combinations("rules").flatten().tolist()
        [2, 4]
        """
        require_part(self, part)
        return self._parts[part][0]

    def alignments(self, part: str) -> Tensor:
        """(alignments, 2, features): where the second and third column have the first's features.

        >>> Raven(features=2).alignments("permutations").tolist()
        [[[0, 1], [1, 0]]]
        """
        require_part(self, part)
        return self._parts[part][1]

    def panels(self, part: str, count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """(puzzles, rows, columns, features), and the rules of the last panel's features.

        >>> panels, rules = Raven(features=2).panels("test", 3, random_stream(0, "example"))
        >>> panels.shape, rules.shape
        (torch.Size([3, 3, 3, 2]), torch.Size([3, 2]))
        """
        known, aligned = self.combinations(part), self.alignments(part)
        if not len(known) or not len(aligned):
            raise EvaluationError(
                f"part='{part}' of raven with features={self.features} and held_out="
                f"{self.held_out} is empty; give more features, or hold more out."
            )
        rules = known[torch.randint(len(known), (count,), generator=stream)]
        shape = (count, self.features, SIDE)
        first, second = (torch.randint(VALUES, shape, generator=stream) for _ in range(2))
        three = torch.rand(count, self.features, VALUES, generator=stream).argsort(-1)[..., :SIDE]
        within = torch.rand(*shape, SIDE, generator=stream).argsort(-1)
        three = three[:, :, None].expand(*shape, SIDE).gather(-1, within)
        made = torch.stack([rule(first, second, three) for rule in RULES.values()])
        grid = made[rules, torch.arange(count)[:, None], torch.arange(self.features)]
        grid = grid.permute(0, 2, 3, 1)  # (puzzles, rows, columns, features)
        order = torch.rand(count, self.features, generator=stream).argsort(-1)
        aligned = aligned[torch.randint(len(aligned), (count,), generator=stream)]
        places = torch.cat([torch.arange(self.features).expand(count, 1, -1), aligned], 1)
        shown = order[:, None].expand_as(places).gather(-1, places.argsort(-1))  # by column
        panels = grid.gather(-1, shown[:, None].expand(-1, SIDE, -1, -1))
        return panels, rules.gather(-1, shown[:, -1])

    def draw(self, part: str, count: int, stream: torch.Generator) -> Problems:
        """So many problems of a part: rules, values and orders are uniform.

        >>> x = Raven().draw("rules", 2, random_stream(0, "example")).x
        >>> x.sum(-1)[0]                               # the tokens of the ninth panel are empty
        tensor([1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1.,
                1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 0., 0., 0., 0.])
        """
        panels, rules = self.panels(part, count, stream)
        while self.unambiguous and part != "train":
            again = (answer_counts(panels) > 1).nonzero().flatten()
            if not len(again):
                break
            panels[again], rules[again] = self.panels(part, len(again), stream)
        seen = panels.flatten(1)
        x = one_hot(seen, VALUES).float()
        x[:, -self.features :] = 0
        return Problems(x, seen[:, -self.features :], rules)

    def labels(self, rules: Tensor) -> Tensor:
        """(problems, features): the number of the rule of each feature of the ninth panel.

        >>> Raven(features=2).labels(torch.tensor([[7, 0]]))
        tensor([[7, 0]])
        """
        return rules

    def loss(self, answers: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy, mean over features.

        >>> Raven().loss(torch.zeros(2, 4, 8), torch.zeros(2, 4, dtype=torch.long))
        tensor(2.0794)
        """
        return cross_entropy(answers.flatten(0, 1), y.flatten())

    def score(self, answers: Tensor, y: Tensor) -> float:
        """The share of features that are told right.

        >>> Raven().score(torch.eye(8)[None, :4], torch.tensor([[0, 1, 2, 7]]))
        0.75
        """
        return float((answers.argmax(-1) == y).double().mean())
