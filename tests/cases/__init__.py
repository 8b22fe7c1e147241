"""All cases, by name. A new one is one entry in one of these files; CONTRIBUTING.md says in which.

>>> CASES["layers: Conv2d"].make()
Conv2d(2, 4, kernel_size=(3, 3), stride=(1, 1), padding=same, dilation=(2, 2))
"""

from tests.cases import architectures, layers, structures, uses
from tests.cases.case import Case

KINDS: dict[str, dict[str, Case]] = {
    "layers": layers.CASES,
    "uses": uses.CASES,
    "structures": structures.CASES,
    "architectures": architectures.CASES,
}

CASES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}


def without(*tags: str) -> list[str]:
    """The names of the cases that have none of the tags.

    >>> "layers: LSTM" in without("mixes"), "layers: LSTM" in without("refused")
    (False, True)
    """
    return [name for name, case in CASES.items() if not case.tags & set(tags)]
