"""What tokens are like after each block, beside how much attention can bring them together."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from dualform.diagnose import dobrushin, spread
from dualform.diagnose.blocks import find_blocks, watched
from dualform.diagnose.calls import BlockState
from dualform.studies.collapse.networks import random_blocks
from dualform.studies.collapse.setting import Architecture, CollapseSetting
from dualform.studies.collapse.training import HiddenCharacters
from dualform.studies.parts import Found


@torch.no_grad()
def by_depth(blocks: nn.Module, x: Tensor) -> Found:
    """The measures of the tokens before the first block and after each, in float64.

    `contraction` is Dobrushin's coefficient of a block's attention; `together` that of the product
    of all attention so far, which is what the tokens went through where a block only attends.

    >>> from dualform.studies.collapse.networks import random_blocks
    >>> setting = CollapseSetting(tokens=6, width=4, depth=3)
    >>> found = by_depth(random_blocks(setting, Architecture()), torch.randn(2, 6, 4))
    >>> len(found["distance"]), len(found["contraction"])
    (4, 3)
    """
    blocks, x = deepcopy(blocks).double().eval(), x.double()
    levels, contraction, together, least = [spread(x)], list[float](), list[float](), list[float]()
    product = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)

    def see(seen: BlockState) -> None:
        nonlocal product
        (weights,) = seen.weights
        product = weights[:, 0] @ product
        levels.append(spread(seen.tokens))
        contraction.append(float(dobrushin(weights).mean()))
        together.append(float(dobrushin(product).mean()))
        least.append(float(weights[weights > 0].min()))

    with watched(blocks, find_blocks(blocks, "*"), see, with_weights=True):
        blocks(x)
    found: Found = {name: [asdict(s)[name] for s in levels] for name in asdict(levels[0])}
    return {**found, "contraction": contraction, "together": together, "least": least}


@dataclass(frozen=True)
class CollapseMeasurement:
    """Makes the networks of the study, and measures them."""

    setting: CollapseSetting
    task: HiddenCharacters
    device: str

    def random(self, seed: int) -> Found:
        """All random networks, on the same tokens."""
        setting, found = self.setting, Found()
        shape = (setting.samples, setting.tokens, setting.width)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for architecture in setting.random():
            torch.manual_seed(seed)
            blocks = random_blocks(setting, architecture).to(self.device)
            found[architecture.name] = by_depth(blocks, x.to(self.device))
        return found

    def trained(self, seed: int, architecture: Architecture) -> Found:
        """A network before it is trained and after, on text that it was not trained on."""
        model = self.task.make(architecture, seed).to(self.device)
        ids = self.task.test[0].to(self.device)
        found: Found = {}
        for when in ("before", "after"):
            with torch.no_grad():
                tokens = model.enter(ids)
            found[when] = {**by_depth(model.blocks, tokens), "loss": self.task.loss(model)}
            if when == "before":
                self.task.train(model, seed)
        return found
