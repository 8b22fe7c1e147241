"""Hidden chains: does a sequence stay in its state more often than it leaves it?

Each token is one of two orthogonal states and noise outside of their plane. Two heads read a
sequence: one brings the token before wherever the state stayed, and the first token, which is
empty, where it did not; the other brings the mean of all. So the first path counts the class, and
both bring the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.diagnose import PathPrior, fit_paths, path_features
from dualform.studies.parts import Found
from dualform.studies.paths.setting import PathsSetting

WIDTH, LENGTH_OF_STATE = 200, 200**0.5
STAYS = {1: 0.7, -1: 0.3}
"""How likely a sequence of each class stays in its state."""
TEMPERATURE = 0.01


def hidden_states(y: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(sequences, length) of 0 and 1, for classes +1 and −1.

    >>> hidden_states(torch.tensor([1, -1]), 5, torch.Generator()).shape
    torch.Size([2, 5])
    """
    stay = torch.where(y > 0, STAYS[1], STAYS[-1])[:, None]
    leaves = torch.rand(len(y), length, generator=generator) >= stay
    leaves[:, 0] = torch.rand(len(y), generator=generator) < 0.5
    return leaves.long().cumsum(1) % 2


def sequences(states: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """(sequences, 1 + length, width): an empty token, then one for each state."""
    basis = torch.linalg.qr(torch.randn(WIDTH, 2, generator=generator, dtype=torch.float64)).Q
    drawn = torch.randn(*states.shape, WIDTH, generator=generator, dtype=torch.float64)
    outside = drawn - drawn @ basis @ basis.T
    x = LENGTH_OF_STATE * basis.T[states] + noise * outside
    return torch.cat([torch.zeros_like(x[:, :1]), x], 1)


def attention(states: Tensor) -> list[Tensor]:
    """The weights of two layers: both heads of the first, and the mean of all in the second."""
    count, tokens = len(states), states.shape[1] + 1
    tells = torch.zeros(count, tokens, tokens, dtype=torch.float64)
    tells[:, :2, 0] = 1.0
    stayed = (states[:, 1:] == states[:, :-1]).double()
    at = torch.arange(2, tokens)
    tells[:, at, at - 1] = stayed
    tells[:, at, 0] = 1 - stayed
    mean = torch.full((count, tokens, tokens), 1 / tokens, dtype=torch.float64)
    return [torch.stack([tells, mean], 1), mean[:, None]]


def measure_chains(setting: PathsSetting, seed: int) -> Found:
    """Test accuracy at each noise, of the Gaussian process and of layers of each width."""
    found: Found = {}
    for noise in setting.noises:
        generator = torch.Generator().manual_seed(seed)
        count = setting.chains + setting.test_chains
        y = 2 * torch.randint(2, (count,), generator=generator) - 1
        states = hidden_states(y, setting.length, generator)
        features = path_features(sequences(states, noise, generator), attention(states), query=0)
        train, test = features[: setting.chains], features[setting.chains :]
        given, wanted = y[: setting.chains].double(), y[setting.chains :]
        fits = {"Gaussian process": fit_paths(train, given, prior_of(1.0), renormalized=False)}
        fits |= {f"N = {n}": fit_paths(train, given, prior_of(n)) for n in setting.widths}
        found[f"{noise:g}"] = {
            name: {
                "accuracy": float((fit.predict(test).sign() == wanted).double().mean()),
                "cosine": float(fit.order[0, 1] / (fit.order[0, 0] * fit.order[1, 1]).sqrt()),
            }
            for name, fit in fits.items()
        }
    return found


def prior_of(width: float) -> PathPrior:
    """Two paths: two heads, then one."""
    return PathPrior((2, 1), width, temperature=TEMPERATURE)
