"""Sequences of labels: the family is a linear-chain conditional random field."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds
from dualform.families.measures.measure import Measure


class Chain(Measure):
    """h counts sequences y of n labels out of s: p(y) ∝ exp(Σ_t a_t(y_t) + Σ_t b_t(y_t, y_{t+1})).

    η holds the scores a of labels (n, s) and b of neighbors (n − 1, s, s), in one row, and x has a
    1 for each of them that belongs to y. G is computed by the forward recursion, ∇G are the
    marginals, and as T → 0 the mean is Viterbi's sequence. A score of −∞ excludes a label or a pair
    of neighbors; shorter sequences have `lengths`. (Lafferty, McCallum and Pereira 2001.)

    >>> from dualform.families import LogNormalizer
    >>> chain = Chain(length=3, labels=2)
    >>> labels = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    >>> eta = chain.eta(labels, neighbors=torch.tensor([[0.0, -9.0], [-9.0, 0.0]]))
    >>> chain.marginals(eta)[:, 0]  # neighbors agree: σ(2 − 1), nearly
    tensor([0.7307, 0.7309, 0.7312])
    >>> best = LogNormalizer(chain, temperature=1e-6).mean(eta)
    >>> torch.equal(best, chain.statistics(torch.tensor([0, 0, 0])))
    True
    """

    def __init__(self, length: int, labels: int) -> None:
        super().__init__()
        if length < 1 or labels < 1:
            raise FamilyError(
                f"length={length} and labels={labels} leave nothing to choose; both must be 1 or "
                "more."
            )
        self.length, self.labels = length, labels

    def __repr__(self) -> str:
        return f"Chain(length={self.length}, labels={self.labels})"

    @property
    def width(self) -> int:
        """n s + (n − 1) s²."""
        return self.labels * (self.length + (self.length - 1) * self.labels)

    @property
    def exact(self) -> bool:
        """Yes."""
        return True

    @property
    def excludes(self) -> bool:
        """Yes: sequences with a score of −∞ do not happen."""
        return True

    def eta(
        self,
        labels: Float[Tensor, "*batch n s"],
        neighbors: Float[Tensor, "*#pairs s s"],
        lengths: Int[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*batch d"]:
        """η of scores; those of neighbors may be the same at every place.

        Beyond its length a sequence has label 0, at no score: G and the marginals up to there are
        those of a chain that ends there.

        >>> chain = Chain(length=2, labels=2)
        >>> eta = chain.eta(torch.zeros(2, 2, 2), torch.zeros(2, 2), torch.tensor([2, 1]))
        >>> chain.log_normalizer(eta).exp()  # how many sequences there are
        tensor([4., 2.])
        """
        batch = labels.shape[:-2]
        pairs = neighbors.expand(*batch, self.length - 1, self.labels, self.labels)
        if lengths is not None:
            beyond = self._beyond(lengths)
            others = torch.arange(self.labels, device=labels.device) > 0
            labels = labels.masked_fill(beyond.unsqueeze(-1), 0)
            labels = labels.masked_fill(beyond.unsqueeze(-1) & others, -torch.inf)
            pairs = pairs.masked_fill(beyond[..., 1:, None, None], 0)
        return torch.cat([labels.flatten(-2), pairs.flatten(-3)], dim=-1)

    def statistics(
        self, y: Int[Tensor, "*batch n"], lengths: Int[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch d"]:
        """x of sequences of labels; beyond its length a sequence is read as label 0."""
        if lengths is not None:
            y = y.masked_fill(self._beyond(lengths), 0)
        one = F.one_hot(y, self.labels).to(torch.get_default_dtype())
        return self.eta(one, one[..., :-1, :, None] * one[..., 1:, None, :])

    def marginals(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch n s"]:
        """p(y_t): the part of the mean that belongs to labels."""
        return self._split(self.mean(eta))[0]

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """log Σ_y exp(η·x(y)), place by place."""
        total = _sum(self._forward(eta)[-1], -1)
        if not holds(total > -torch.inf):
            raise FamilyError(
                f"every sequence of {self} is excluded by scores of −∞; leave at least one."
            )
        return total

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """0 where x is that of a sequence, −∞ elsewhere."""
        sequence = self.statistics(self._split(x)[0].argmax(-1)).to(x)
        off = ~torch.isclose(x, sequence, rtol=0, atol=1e-5).all(-1)
        return x.new_zeros(off.shape).masked_fill(off, -torch.inf)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *batch d"]:
        """Statistics of sequences, drawn from the last label to the first."""
        eta = eta.expand(count, *eta.shape)
        levels, (_, pairs) = self._forward(eta), self._split(eta)
        drawn = [_draw(levels[-1], generator)]
        for t in range(self.length - 2, -1, -1):
            after = drawn[-1][..., None, None].expand(*eta.shape[:-1], self.labels, 1)
            given = pairs[..., t, :, :].gather(-1, after).squeeze(-1)
            drawn.append(_draw(levels[t] + given, generator))
        return self.statistics(torch.stack(drawn[::-1], dim=-1)).to(eta)

    def _beyond(self, lengths: Tensor) -> Tensor:
        if not holds((lengths >= 1) & (lengths <= self.length)):
            raise FamilyError(
                f"lengths from {int(lengths.min())} to {int(lengths.max())} do not fit {self}; "
                f"each must lie between 1 and {self.length}."
            )
        return torch.arange(self.length, device=lengths.device) >= lengths.unsqueeze(-1)

    def _forward(self, eta: Tensor) -> list[Tensor]:
        """For each place and label, log Σ exp of all that can stand before."""
        labels, pairs = self._split(eta)
        levels = [labels[..., 0, :]]
        for t in range(1, self.length):
            past = _sum(levels[-1].unsqueeze(-1) + pairs[..., t - 1, :, :], -2)
            levels.append(past + labels[..., t, :])
        return levels

    def _split(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        n, s, batch = self.length, self.labels, eta.shape[:-1]
        labels, pairs = eta[..., : n * s], eta[..., n * s :]
        return labels.reshape(*batch, n, s), pairs.reshape(*batch, n - 1, s, s)


def _sum(logits: Tensor, dim: int) -> Tensor:
    """log Σ exp, with a slope of 0 where all of it is excluded."""
    nothing = (logits == -torch.inf).all(dim, keepdim=True)
    sums = logits.masked_fill(nothing, 0).logsumexp(dim)
    return sums.masked_fill(nothing.squeeze(dim), -torch.inf)


def _draw(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    p = logits.softmax(-1)
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator)
    return drawn.reshape(p.shape[:-1])
