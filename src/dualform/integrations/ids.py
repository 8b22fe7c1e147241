"""Sample ids that travel with their batch, from the dataset to the training loop.

Loaders fetch ahead: worker processes, accelerate (one batch), the transformers Trainer (all that it
accumulates). So an id is not taken from the sampler, but read where the item is read, packed where
the batch is made, and taken off where the batch is used:

    Indexed dataset ──► Collate ──► (workers, look-ahead, device) ──► off again, the batch as it was
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dualform.errors import RecordingError
from dualform.private import LOADER_ITERATOR
from dualform.recording import Recorder

Loader = TypeVar("Loader", bound=Iterable[Any])


@dataclass(frozen=True)
class LoaderIds:
    """The sample ids of a batch, as one value that no loader takes apart or moves.

    >>> LoaderIds([3, 1]).to("cuda").values
    [3, 1]
    """

    values: list[Any]

    def to(self, *args: Any, **kwargs: Any) -> LoaderIds:
        """Itself: ids stay where they are when their batch goes to a device."""
        return self


class Carried(NamedTuple):
    """A batch and its ids, on the way. A tuple, so it is pinned and moved like any other.

    >>> Carried(["a"], LoaderIds([7])).batch
    ['a']
    """

    batch: Any
    ids: LoaderIds


Pack: TypeAlias = Callable[[Any, LoaderIds], Any]
"""Makes one value of a batch and its ids."""
Deliver: TypeAlias = Callable[[Iterator[Carried]], Iterator[Any]]
"""Takes the ids off again, as the batches are handed out."""


class Fetched(NamedTuple):
    """What was read from a dataset, and where.

    >>> Fetched([0], ["first"]).indices
    [0]
    """

    indices: list[Any]
    items: Any


class Indexed(Dataset[Any]):
    """A dataset whose batches of items know their indices.

    >>> Indexed(["a", "b", "c"]).__getitems__([2, 0])
    Fetched(indices=[2, 0], items=['c', 'a'])
    """

    def __init__(self, dataset: Any, batched: bool = True) -> None:
        self.dataset = dataset
        self._batched = batched

    def __getitems__(self, indices: Sequence[Any]) -> Fetched:
        whole = getattr(self.dataset, "__getitems__", None)
        items = whole(indices) if whole else [self.dataset[index] for index in indices]
        return Fetched([_plain(index) for index in indices], items)

    def __getitem__(self, index: Any) -> Any:
        if self._batched:  # then the loader asks `__getitems__`, and this is somebody else
            return self.dataset[index]
        indices = list(index) if isinstance(index, list | tuple) else [index]
        return Fetched([_plain(each) for each in indices], self.dataset[index])

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Collate:
    """A collate function that packs the ids with the batch.

    >>> Collate(sum, Carried)(Fetched([4, 5], [1, 2]))
    Carried(batch=3, ids=LoaderIds(values=[4, 5]))
    """

    def __init__(self, collate: Callable[[Any], Any], pack: Pack) -> None:
        self.collate, self.pack = collate, pack

    def __call__(self, fetched: Fetched) -> Any:
        return self.pack(self.collate(fetched.items), LoaderIds(fetched.indices))


def is_indexed(loader: object) -> bool:
    """Whether a loader reads a dataset by index: not a stream, and not a loader of its own kind.

    >>> is_indexed(DataLoader([1, 2])), is_indexed([1, 2])
    (True, False)
    """
    base = _base(loader)
    return isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset)


def check_loader(loader: object) -> None:
    """Refuses loaders whose batches have no ids, or would lose them.

    >>> check_loader([1, 2])
    Traceback (most recent call last):
    dualform.errors.RecordingError: ids are read from a torch DataLoader...this is a list; ...
    """
    given = type(loader).__name__
    if not isinstance(_base(loader), DataLoader):
        raise RecordingError(
            f"ids are read from a torch DataLoader's dataset, and this is a {given}; "
            "call recorder.samples(ids) before each forward pass instead."
        )
    if not is_indexed(loader):
        raise RecordingError(
            f"the loader's dataset is a stream ({type(_base(loader).dataset).__name__}), whose "
            "samples have no index; call recorder.samples(ids) before each forward pass, or leave "
            "the ids out: samples are then numbered in the order they are seen."
        )
    if given == "DataLoaderDispatcher":
        raise RecordingError(
            "accelerate's dispatch_batches=True joins and cuts batches, and the ids would be lost; "
            "use dispatch_batches=False."
        )


def carry_in_place(loader: object, pack: Pack) -> Callable[[], None]:
    """Makes a loader that somebody else holds pack ids with its batches; returns what undoes it.

    >>> loader = DataLoader([10, 20], batch_size=2, collate_fn=sum)
    >>> undo = carry_in_place(loader, Carried)
    >>> list(loader), undo(), list(loader)
    ([Carried(batch=30, ids=LoaderIds(values=[0, 1]))], None, [30])
    """
    check_loader(loader)
    attributes = vars(_base(loader))
    changed = _carrying(attributes, pack)
    before = {name: attributes[name] for name in changed}
    attributes.update(changed)
    return partial(attributes.update, before)


class _Naming:
    """Mixed into a loader's own class: its batches have been packed, and are unpacked here."""

    _deliver: Deliver

    def __iter__(self) -> Iterator[Any]:
        return self._deliver(super().__iter__())  # type: ignore[misc]


def naming(loader: Loader, deliver: Deliver) -> Loader:
    """A loader like this one, of its class and with its sampler, that delivers ids as it goes.

    >>> def show(carried):
    ...     for batch, ids in carried:
    ...         print(ids.values)
    ...         yield batch
    >>> list(naming(DataLoader([10, 20], batch_size=2, collate_fn=sum), show))
    [0, 1]
    [30]
    """
    check_loader(loader)
    twin = _copy(loader, type(f"Naming{type(loader).__name__}", (_Naming, type(loader)), {}))
    base = _base(loader)
    if base is not loader:  # accelerate's, around one of torch's
        twin.base_dataloader = _copy(base, type(base))
    attributes = vars(_base(twin))
    attributes.update(_carrying(attributes, Carried))
    twin._deliver = deliver
    return cast(Loader, twin)


_TWINS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""One twin a loader: it counts epochs and keeps workers as that loader would have."""


def with_ids(loader: Loader, recorder: Recorder) -> Loader:
    """The loader, naming the samples of each batch it hands out by their index in its dataset.

    The batches are as they were, also from worker processes and loaders prepared by accelerate.
    Each batch is to be used before the next is asked for.

    >>> import tempfile, torch, dualform
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = TensorDataset(torch.randn(6, 3), torch.randn(6, 2))
    >>> loader = DataLoader(data, batch_size=2, shuffle=True)
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> path = tempfile.mkdtemp() + "/run"
    >>> with dualform.record(model, optimizer, path) as recorder:
    ...     for x, y in with_ids(loader, recorder):
    ...         (model(x) - y).square().mean().backward()
    ...         optimizer.step(); optimizer.zero_grad()
    >>> dualform.open(path).ids
    [0, 1, 2, 3, 4, 5]
    """
    check_loader(loader)
    deliver = partial(_to_recorder, recorder)
    twin: Any = loader if isinstance(loader, _Naming) else _TWINS.get(loader)
    if twin is None:
        twin = _TWINS[loader] = naming(loader, deliver)
    twin._deliver = deliver
    return cast(Loader, twin)


def _to_recorder(recorder: Recorder, carried: Iterator[Carried]) -> Iterator[Any]:
    for batch, ids in carried:
        recorder.samples(ids.values)
        yield batch


def _base(loader: object) -> Any:
    """torch's own loader, inside one that accelerate has prepared."""
    return getattr(loader, "base_dataloader", loader)


def _carrying(attributes: dict[str, Any], pack: Pack) -> dict[str, Any]:
    """The attributes of a loader that make its batches carry their ids.

    torch forbids setting `dataset`, as the samplers were made for it; here the indices stay.
    """
    batched = attributes["batch_sampler"] is not None
    return {
        "dataset": Indexed(attributes["dataset"], batched),
        "collate_fn": Collate(attributes["collate_fn"], pack),
        LOADER_ITERATOR: None,  # persistent workers have the dataset as it was
    }


def _copy(loader: Any, kind: type) -> Any:
    twin: Any = object.__new__(kind)
    vars(twin).update(vars(loader))
    return twin


def _plain(index: Any) -> Any:
    """An index as Python's own number; numpy's and torch's count as those."""
    return index.item() if isinstance(index, Tensor) or hasattr(index, "item") else index
