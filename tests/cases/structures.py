"""Models in which the shape of a layer's input does not say whose row is whose.

Each structure is built for `B` samples. No sample sees another, so what a sample adds to a
weight is the gradient of its own loss, which the law of attribution compares it with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.cases.case import Case, classes, squares
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

B, D = 6, 8


CASES: dict[str, Case] = {}


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(*shape, generator=generator(step), dtype=torch.float64)


def tokens(*shape: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randint(0, 31, shape, generator=generator(step))


def structure(
    inputs: Callable[[int], Any],
    name: str = "",
    losses: Callable[[nn.Module, Any], Tensor] = classes,
    by_step: dict[str, str] | None = None,
    ids: Callable[[int], list[Any]] | None = None,
    axis: int = 0,
    noise: str = r"in_proj_bias$",  # of which attention takes the keys' third out again
    **options: Any,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Registers a class of models as a structure; it may carry several, for several sizes."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        label = f"{kind.__name__}{', ' + name if name else ''}"
        make = lambda: kind(**options)  # noqa: E731
        CASES[label] = Case(make, inputs, losses, by_step or {}, noise, ids, axis)
        return kind

    return register


class Tokens(nn.Module):
    """What most structures begin and end with: words, and three numbers for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(31, D), nn.Linear(D, 3)


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(D, 2, **options)


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, **options)


# Samples folded together with windows, frames, views or time


@structure(numbers(B, 5, 4, 3))
@structure(numbers(B, 4, B, 3), "a window has as many tokens as there are samples")
@structure(numbers(B, B, 4, 3), "as many windows as samples")
class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.head = (
            nn.Linear(3, D),
            attention(batch_first=True),
            nn.Linear(D, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).flatten(0, 1)
        h = self.mix(h, h, h, need_weights=False)[0]
        return self.head(h.reshape(len(x), -1, D).mean(1))


@structure(numbers(B, 5, 4, 3))
@structure(numbers(B, B, B, 3), "all sizes alike")
class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.head = (
            nn.Linear(3, D),
            encoder(batch_first=True),
            nn.Linear(D, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.enter(x).flatten(0, 1))
        return self.head(h.reshape(len(x), -1, D).mean(1))


@structure(numbers(B, 5, 4, 3))
@structure(numbers(B, 5, B, 3), "as many patches as samples")
class SpaceThenTime(nn.Module):
    """Attention over space with time in the batch, then over time with space in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, D), nn.Linear(D, 3)
        self.space, self.time = encoder(batch_first=True), encoder()

    def forward(self, x: Tensor) -> Tensor:
        samples, time, space = x.shape[:3]
        h = self.space(self.enter(x).flatten(0, 1)).reshape(samples, time, space, D)
        h = self.time(h.permute(1, 2, 0, 3).flatten(1, 2)).reshape(time, space, samples, D)
        return self.head(h.mean((0, 1)))


def last_frames(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean((0, 2))


@structure(numbers(5, B, 2, 6, 6), losses=last_frames, axis=1)
class TimeFirstConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.conv(x.flatten(0, 1)))
        return self.head(h.flatten(1)).view(*x.shape[:2], 3)


def triplets(step: int) -> tuple[Tensor, ...]:
    return tuple(numbers(B, 3, 8, 8)(10 * step + part) for part in range(3))


def triplet_losses(model: nn.Module, x: tuple[Tensor, ...]) -> Tensor:
    return F.triplet_margin_loss(*model(*x), margin=5.0, reduction="none")


@structure(triplets, losses=triplet_losses, noise=r"head\.bias$")
class ThreePictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, D)

    def forward(self, *x: Tensor) -> tuple[Tensor, ...]:
        return self.head(torch.relu(self.conv(torch.cat(x))).flatten(1)).chunk(3)


@structure(numbers(B, 2, 3, 8, 8), losses=squares)
class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.conv(torch.cat(x.unbind(1)))).flatten(1)
        return torch.stack(self.head(h).chunk(2), 1)


@structure(tokens(B, 7))
@structure(tokens(B, B), "as many words as samples")
@structure(tokens(B, 2 * B), "twice as many words as samples")
class TimeFolded(Tokens):
    """The rows are (t b), as einops writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        samples, time = x.shape
        h = self.words(x).transpose(0, 1).reshape(time * samples, D)
        return self.head(torch.tanh(self.mix(h)).view(time, samples, D).mean(0))


@structure(numbers(B, 5, 4, D))
@structure(numbers(B, B, B, D), "all sizes alike")
class HeadsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x.permute(1, 0, 2, 3)))
        return self.head(h.mean((0, 2)))


@structure(numbers(B, 5, D))
@structure(numbers(B, B, D), "as many patches as samples")
@structure(numbers(B, 7, D), "checkpointed", saving=True)
class Mixer(nn.Module):
    """Linear maps over positions, then over channels."""

    def __init__(self, saving: bool = False) -> None:
        super().__init__()
        self.saving, self.head = saving, nn.Linear(D, 3)
        self.channels, self.scale = nn.Linear(D, D), nn.LayerNorm(D)
        self.places = nn.ModuleDict({str(n): nn.Linear(n, n) for n in (5, 6, 7)})

    def mix(self, x: Tensor) -> Tensor:
        h = x + self.places[str(x.shape[1])](self.scale(x).mT).mT
        return h + torch.tanh(self.channels(h))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.mix, x, use_reentrant=False) if self.saving else self.mix(x)
        return self.head(h.mean(1))


@structure(numbers(B, 6, D), "one weight in two orders")
class TwoOrders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x)).transpose(0, 1)
        return self.head(torch.tanh(self.mix(h)).mean(0))


# Time first inside, or outside


@structure(tokens(B, 7), "LSTM", core=lambda: nn.LSTM(D, D))
@structure(tokens(B, B), "LSTM, as many words as samples", core=lambda: nn.LSTM(D, D))
@structure(
    tokens(B, B),
    "GRU of two layers, both ways",
    core=lambda: nn.GRU(D, D // 2, 2, bidirectional=True),
)
@structure(tokens(B, 7), "transformer", core=encoder)
@structure(tokens(B, B), "transformer, as many words as samples", core=encoder)
class TimeFirstInside(Tokens):
    def __init__(self, core: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.enter, self.core = nn.Linear(D, D), core()

    def forward(self, x: Tensor) -> Tensor:
        h = self.core(self.enter(self.words(x)).transpose(0, 1))
        return self.head((h[0] if isinstance(h, tuple) else h).mean(0))


@structure(tokens(7, B), axis=1)
@structure(tokens(B, B), "as many words as samples", axis=1)
class TimeFirstOutside(Tokens):
    """Where time is as long as the batch, only what mixes tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTM(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.words(x))[0].mean(0))


def lengths(longest: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def draw(step: int) -> tuple[Tensor, Tensor]:
        sizes = torch.randint(1, longest + 1, (B,), generator=generator(step))
        sizes[step % B] = longest
        return tokens(B, longest)(step), sizes

    return draw


@structure(lengths(7))
@structure(lengths(B), "the longest as long as the batch")
class Packed(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.words(x), sizes.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.core(packed)[0], batch_first=True)
        return self.head(out.sum(1))


@structure(lengths(7))
class PackedRows(Tokens):
    """Layers on the rows of a packed sequence, without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.words(x), sizes.cpu(), batch_first=True, enforce_sorted=False
        )
        packed = packed._replace(data=torch.tanh(self.mix(packed.data)))
        out, _ = pad_packed_sequence(packed, batch_first=True)
        return self.head(out.sum(1))


@structure(lengths(7))
class LastWord(Tokens):
    """The data chooses a place in each sample, which stays where it is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.GRU(D, D, batch_first=True)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        out = self.core(self.words(x))[0]
        return self.head(out[torch.arange(len(x)), sizes - 1])


@structure(numbers(8, 3, 4), losses=squares)
class BothWays(nn.Module):
    """The outputs of a recurrent layer that reads its input from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


# Rows that the data moves


@structure(numbers(B, D))
class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        h = torch.tanh(self.mix(x[order]))
        return self.head(h[order.argsort()])


@structure(tokens(B, 7))
class Pruned(Tokens):
    """Three words of each sample, chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        chosen = h[:, :, 0].topk(3, 1)[1][..., None].expand(-1, -1, D)
        return self.head(torch.tanh(self.mix(h.gather(1, chosen))).mean(1))


@structure(tokens(B, 32), "a capacity that samples divide")
@structure(tokens(B, 8), "few words")
class ExpertChoice(Tokens):
    """Every expert takes the same number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x).flatten(0, 1)
        out = words
        for at, expert in enumerate(self.experts):
            chosen = words[:, at].detach().topk(len(words) // 4)[1]
            out = out.index_add(0, chosen, torch.tanh(expert(words[chosen])))
        return self.head(out.view(len(x), -1, D).mean(1))


@structure(tokens(B, 7))
class TokenChoice(Tokens):
    """Every word takes an expert; an expert may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x).flatten(0, 1)
        shares = self.gate(words).softmax(-1)
        best, out = shares.argmax(-1), torch.zeros_like(words)
        for at, expert in enumerate(self.experts):
            (chosen,) = torch.where(best == at)
            out.index_add_(0, chosen, expert(words[chosen]) * shares[chosen, at, None])
        return self.head(out.view(len(x), -1, D).mean(1))


@structure(lambda step: (numbers(B, D)(step), tokens(B)(step) % 2))
class OneLayerAClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, 3) for _ in range(2))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for at, layer in enumerate(self.layers):
            out[kind == at] = layer(x[kind == at])
        return out


def chosen(*sizes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Five words for each sample, and a mask of the first few."""
    mask = torch.arange(5) < torch.tensor(sizes)[:, None]
    return lambda step: (numbers(len(sizes), 5, 3)(step), mask)


def chosen_losses(model: nn.Module, x: tuple[Tensor, Tensor]) -> Tensor:
    squared = model(*x).square().sum(1)
    return squared.new_zeros(len(x[0])).index_add(0, x[1].nonzero()[:, 0], squared)


@structure(chosen(1, 3), "1 and 3", losses=chosen_losses)
@structure(chosen(1, 4), "1 and 4", losses=chosen_losses)
@structure(chosen(2, 2), "2 and 2", losses=chosen_losses)
class Chosen(nn.Module):
    """A head on the words that a mask chooses, as masked language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(x[mask])


def graphs(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four graphs of 3, 5, 4 and 6 nodes, each a ring: features, edges, and whose node it is."""
    sizes, start, edges = [3, 5, 4, 6], 0, []
    for size in sizes:
        ring = torch.arange(size)
        edges.append(start + torch.stack([ring, (ring + 1) % size]))
        start += size
    owner = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    return numbers(start, D)(step), torch.cat(edges, 1), owner


def graph_ids(step: int) -> list[str]:
    return [f"graph {g}" for g in graphs(step)[2].tolist()]


@structure(graphs, ids=graph_ids)
@structure(graphs, "with a layer on edges", ids=graph_ids, edges=True)
class Graphs(nn.Module):
    """Messages along edges, added up at nodes, and nodes at graphs: an id for each node."""

    def __init__(self, edges: bool = False) -> None:
        super().__init__()
        self.send, self.stay, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.edge = nn.Linear(2 * D, D) if edges else None

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        source, target = edges
        sent = self.send(x)[source]
        if self.edge is not None:
            sent = torch.tanh(self.edge(torch.cat([sent, x[target]], 1)))
        h = torch.tanh(self.stay(x).index_add(0, target, sent))
        pooled = h.new_zeros(int(owner.max()) + 1, D).scatter_add(0, owner[:, None].expand_as(h), h)
        return self.head(pooled)


# Rows that depend on no sample

NOBODY, KEYS = "its rows belong to no sample", r"project\.bias$"


@structure(tokens(B, 7), by_step={"places": NOBODY, "scale": NOBODY})
@structure(tokens(B, B), "as many places as samples", by_step={"places": NOBODY, "scale": NOBODY})
class NormalizedPlaces(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.scale = nn.Embedding(7, D), nn.LayerNorm(D)
        self.mix = encoder(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        places = self.scale(self.places(torch.arange(x.shape[1])))
        return self.head(self.mix(self.words(x) + places).mean(1))


@structure(tokens(B, 7), by_step={"distances": NOBODY}, noise=KEYS)
@structure(tokens(B, B), "as many words as samples", by_step={"distances": NOBODY}, noise=KEYS)
class RelativeBias(Tokens):
    """A table of distances, shared by all samples, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.distances = nn.Linear(D, 3 * D), nn.Embedding(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        samples, time = x.shape
        q, k, v = (
            self.project(self.words(x)).view(samples, time, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        )
        far = torch.arange(time)[:, None] - torch.arange(time) + 8
        scores = q @ k.mT + self.distances(far).permute(2, 0, 1)
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2).mean(1))


@structure(numbers(B, D), by_step={"prototypes": NOBODY, "project": NOBODY})
class Prototypes(nn.Module):
    """As many prototypes as samples, put through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.project = nn.Parameter(torch.randn(B, D)), nn.Linear(D, D)
        self.enter, self.head = nn.Linear(D, D), nn.Linear(B, 3)

    def forward(self, x: Tensor) -> Tensor:
        prototypes = self.project(self.prototypes + 0)
        return self.head(torch.tanh(self.enter(x)) @ prototypes.T)


@structure(tokens(B, 7))
@structure(tokens(B, B), "as many words as samples")
class ClassToken(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix = nn.Parameter(torch.randn(1, 1, D)), encoder(batch_first=True)
        self.places = nn.Parameter(torch.randn(1, 9, D))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.words(x)], 1)
        return self.head(self.mix(h + self.places[:, : h.shape[1]])[:, 0])


@structure(numbers(B, 7, D))
@structure(numbers(B, 7, D), "as many queries as samples", queries=B)
class Queries(nn.Module):
    """Learned queries for every sample, which first see each other and then the sample."""

    def __init__(self, queries: int = 4) -> None:
        super().__init__()
        self.queries, self.head = nn.Embedding(queries, D), nn.Linear(D, 3)
        self.core = nn.TransformerDecoderLayer(D, 2, 16, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.weight[:, None].repeat(1, len(x), 1)
        return self.head(self.core(queries, x.transpose(0, 1)).mean(0))


@structure(tokens(B, 7))
@structure(tokens(B, B), "as many words as samples")
class TypesAndPlaces(Tokens):
    """Tables that are read alike for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.places, self.mix = (
            nn.Embedding(2, D),
            nn.Embedding(7, D),
            encoder(batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand(x.shape)
        h = self.words(x) + self.types(torch.zeros_like(x)) + self.places(places)
        return self.head(self.mix(h).mean(1))


# Other loops


@structure(
    numbers(B, D), "a sample that comes twice", ids=lambda step: ["a", "b", "c", "a", "d", "e"]
)
class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.enter(x)))


def growing(step: int) -> Tensor:
    """Batches and texts of other sizes at every step, among them such as are alike."""
    return tokens(*[(6, 7), (4, 4), (3, 9), (5, 5)][step % 4])(step)


structure(growing, "other sizes", core=encoder)(TimeFirstInside)
structure(growing, "other sizes")(TimeFolded)


@structure(lambda step: (numbers(B, D)(step), numbers(B, D, D)(step)))
class WeightsFromData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.make, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        h = torch.bmm(self.make(z), self.enter(x)[..., None])[..., 0]
        return self.head(torch.tanh(h))


@structure(numbers(B, 4, D))
class OneSampleAtATime(nn.Module):
    """The model takes its batch apart."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(torch.tanh(self.mix(part)).mean(0)) for part in x])
