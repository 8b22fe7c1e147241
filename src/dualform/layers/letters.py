"""Products of tensors as equations with a letter for each dimension, as `einsum` writes them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Letters(NamedTuple):
    """What the dimensions of some factors and of their product are called.

    >>> import torch
    >>> einsum_letters("bd, dh -> bh", [torch.zeros(2, 3), torch.zeros(3, 4)])
    Letters(factors=('bd', 'dh'), out='bh')
    """

    factors: tuple[str, ...]
    out: str


def einsum_letters(equation: str, factors: Sequence[Tensor]) -> Letters:
    """The letters of an einsum; dimensions behind `...` get letters that are free.

    >>> import torch
    >>> einsum_letters("...d, d", [torch.zeros(2, 3, 4), torch.zeros(4)])
    Letters(factors=('YZd', 'd'), out='YZ')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    free = "".join(c for c in string.ascii_letters if c not in equation)

    def spelled(term: str, count: int) -> str:
        return term.replace("...", free[len(free) - count :])

    hidden = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, factors, strict=True)]
    most = max((n for n, t in zip(hidden, terms, strict=True) if "..." in t), default=0)
    return Letters(tuple(map(spelled, terms, hidden)), spelled(right, most))


def lettered(args: Sequence[Any]) -> list[Any]:
    """The arguments of an einsum whose dimensions are numbered, `einsum(a, [0, 1], …, [0, 2])`.

    >>> lettered(["a", [0, 1], "b", [1, ...], [0, ...]])
    ['ab,b...->a...', 'a', 'b']
    """

    def word(numbers: Sequence[Any]) -> str:
        return "".join("..." if n is ... else string.ascii_letters[n] for n in numbers)

    terms = ",".join(word(numbers) for numbers in args[1::2])
    arrow = f"->{word(args[-1])}" if len(args) % 2 else ""
    return [terms + arrow, *args[: len(args) // 2 * 2 : 2]]


def matmul_letters(left: int, right: int) -> Letters:
    """The letters of `a @ b`, for factors of so many dimensions.

    >>> matmul_letters(3, 2), matmul_letters(1, 3)
    (Letters(factors=('Aik', 'kj'), out='Aij'), Letters(factors=('k', 'Akj'), out='Aj'))
    """
    batch = string.ascii_uppercase[: max(left, right, 2) - 2]
    a = batch[len(batch) - left + 2 :] + "ik" if left > 1 else "k"
    b = batch[len(batch) - right + 2 :] + "kj" if right > 1 else "k"
    return Letters((a, b), batch + "i" * (left > 1) + "j" * (right > 1))


def tensordot_letters(a: Tensor, b: Tensor, dims: Any) -> Letters:
    """The letters of `torch.tensordot(a, b, dims)`.

    >>> import torch
    >>> tensordot_letters(torch.zeros(2, 3), torch.zeros(4, 3), ([1], [1]))
    Letters(factors=('ab', 'Ab'), out='aA')
    """
    if isinstance(dims, int):
        dims = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    one, two = list(string.ascii_lowercase[: a.ndim]), list(string.ascii_uppercase[: b.ndim])
    for mine, other in zip(*dims, strict=True):
        two[other] = one[mine]
    kept = [c for c in one if c not in two] + [c for c in two if c not in one]
    return Letters(("".join(one), "".join(two)), "".join(kept))
