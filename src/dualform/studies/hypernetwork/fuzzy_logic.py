"""Fuzzy logic from examples: a network sees inputs with their truth, and tells that of another.

Truth is a number in [0, 1]: not x is 1 − x, x and y is min(x, y), x or y is max(x, y) (Zadeh). A
*term* joins all variables by and, each as it is or negated; a problem's function joins several
terms by or. A problem is rows of inputs, with the function's value for all rows but the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from dualform.errors import EvaluationError
from dualform.studies.hypernetwork.problems import Problems, random_stream, require_part, split

TRIES = 1000
"""So often combinations are split anew until each term is in one that is trained on."""


@dataclass(frozen=True)
class FuzzyLogic:
    """Functions of some terms; combinations of terms, and some terms, are held out of training.

    Parts: "train" and "test" share their functions; "combinations" are new ones of terms that
    training has; "terms" are functions all of whose terms are new.

    >>> task = FuzzyLogic()
    >>> {part: len(task.functions(part)) for part in task.parts}
    {'train': 33, 'test': 33, 'combinations': 33, 'terms': 6}
    >>> problems = task.draw("test", 5, random_stream(0, "example"))
    >>> problems.x.shape, problems.y.shape            # 4 variables, their truth, whether it is told
    (torch.Size([5, 32, 6]), torch.Size([5, 1]))
    """

    variables: int = 4
    terms: int = 2
    """Of a function."""
    rows: int = 32
    """Of a problem, with the one that is asked."""
    held_out: float = 0.5
    """The share of combinations of known terms that are held out."""
    held_out_terms: float = 0.25
    """The share of terms that training does not have."""
    seed: int = 0

    parts = ("train", "test", "combinations", "terms")
    name = "fuzzy_logic"
    has_places = False

    def __post_init__(self) -> None:
        new = int(self.rule_count * self.held_out_terms)
        if not 0 < self.terms <= min(new, self.rule_count - new):
            raise EvaluationError(
                f"terms={self.terms} of a function are drawn from {self.rule_count - new} terms "
                f"in training and from {new} held-out ones; take fewer, or another "
                f"held_out_terms than {self.held_out_terms}."
            )

    @property
    def rule_count(self) -> int:
        """How many terms there are: term t negates variable v where bit v of t is 0.

        >>> FuzzyLogic(variables=3).rule_count
        8
        """
        return 1 << self.variables

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Tokens, numbers of a token, tokens that are asked, and numbers of an answer.

        >>> FuzzyLogic(variables=3, rows=16).shape
        (16, 5, 1, 1)
        """
        return self.rows, self.variables + 2, 1, 1

    @cached_property
    def _functions(self) -> dict[str, Tensor]:
        stream = random_stream(self.seed, "split")
        known, new = split(self.rule_count, self.held_out_terms, stream)
        pairs = torch.tensor(list(combinations(known.tolist(), self.terms)))
        for _ in range(TRIES):
            kept, held_out = split(len(pairs), self.held_out, stream)
            if set(pairs[kept].flatten().tolist()) == set(known.tolist()):
                of_new = torch.tensor(list(combinations(new.tolist(), self.terms)))
                trained = pairs[kept]
                named = (trained, trained, pairs[held_out], of_new)
                return dict(zip(self.parts, named, strict=True))
        raise EvaluationError(
            f"held_out={self.held_out} leaves {len(kept)} combinations to train on, and "
            f"{TRIES} draws of them never had all {len(known)} terms; hold fewer out."
        )

    def functions(self, part: str) -> Tensor:
        """(functions, terms): the numbers of the terms of each function of a part.

        >>> FuzzyLogic(variables=3).functions("terms")
        tensor([[2, 4]])
        """
        require_part(self, part)
        return self._functions[part]

    def truth(self, terms: Tensor, inputs: Tensor) -> Tensor:
        """(…): the truth of functions of terms (…, terms) for inputs (…, variables).

        >>> FuzzyLogic().truth(torch.tensor([15, 0]), torch.tensor([0.9, 0.8, 0.7, 0.6]))
        tensor(0.6000)
        """
        bits = torch.arange(self.variables, device=terms.device)
        plain = (terms[..., None] >> bits) & 1 == 1
        literals = torch.where(plain, inputs[..., None, :], 1 - inputs[..., None, :])
        return literals.amin(-1).amax(-1)

    def draw(self, part: str, count: int, stream: torch.Generator) -> Problems:
        """So many problems of a part: functions and inputs are uniform.

        >>> FuzzyLogic().draw("terms", 2, random_stream(0, "example")).x[:, -1, -2:]
        tensor([[0., 0.],
                [0., 0.]])
        """
        functions = self.functions(part)
        rules = functions[torch.randint(len(functions), (count,), generator=stream)]
        inputs = torch.rand(count, self.rows, self.variables, generator=stream)
        truth = self.truth(rules[:, None], inputs)
        told = torch.ones_like(truth)
        told[:, -1] = 0
        x = torch.cat([inputs, (truth * told)[..., None], told[..., None]], -1)
        return Problems(x, truth[:, -1:], rules)

    def labels(self, rules: Tensor) -> Tensor:
        """(problems, 1): a number for each function.

        >>> FuzzyLogic().labels(torch.tensor([[1, 2], [0, 15]]))
        tensor([[18],
                [15]])
        """
        digits = self.rule_count ** torch.arange(self.terms - 1, -1, -1, device=rules.device)
        return (rules * digits).sum(1, keepdim=True)

    def loss(self, answers: Tensor, y: Tensor) -> Tensor:
        """The mean squared error.

        >>> FuzzyLogic().loss(torch.ones(2, 1, 1), torch.zeros(2, 1))
        tensor(1.)
        """
        return mse_loss(answers[..., 0], y)

    def score(self, answers: Tensor, y: Tensor) -> float:
        """R²: 1 where all answers are right, 0 for who always tells the mean.

        >>> FuzzyLogic().score(torch.full((2, 1, 1), 0.5), torch.tensor([[0.0], [1.0]]))
        0.0
        """
        wrong = (answers[..., 0] - y).double().square().mean()
        return float(1 - wrong / y.double().var(unbiased=False))
