"""What there is to look at: a run, the model it trained, and queries."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import DualformError, ReadingError
from dualform.explore.cards import LONGEST_NAME, plain_label, preview_card, shorten
from dualform.explore.contract import AnyText, ImageSize, QueryCard
from dualform.explore.encoding import Encode, Pixels, decoded_image, typed_text
from dualform.ledger.samples import Label, Preview, SampleId
from dualform.read import Run
from dualform.read.outputs import Asked, check_model, model_outputs, output_tensor

FITTED = 16
"""How many pictures are looked at to find out how inputs are made of pixels."""
TOGETHER = 256
"""How many queries the model is called with at a time."""


@dataclass(frozen=True)
class Query:
    """What to show of one query, beside its numbers.

    >>> pixels = torch.zeros(8, 8, dtype=torch.uint8)
    >>> Query("test digit 3", label=3, preview=Preview("image", pixels)).title
    'test digit 3'
    """

    title: str
    label: Label | None = None
    """Its true label, if known."""
    preview: Preview | None = None


@dataclass(frozen=True)
class Subject:
    """One query that can be asked about: by its input, or as a training sample of the run."""

    name: str
    """As the URL has it: "12", "sample:7", "image:…", "text:…"."""
    query: Query
    x: Any = None
    sample: SampleId | None = None


class Exhibit:
    """A run to look at: with its model and queries, or by its training samples alone.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> exhibit = Exhibit(run, model, x[:2], [Query("one"), Query("two", label=1)])
    >>> len(exhibit), exhibit.subject("1").query.label, exhibit.subject("sample:7").sample
    (2, 1, 7)

    Args:
        model: the recorded one, with the weights of the step that is read.
        x: queries, as in `run.explain`.
        queries: a title, and if known a label and a preview, for each query of x.
        names: what the model's outputs are called, by their numbers: classes, or tokens.
        encode: what the model is called with for a text, or for a picture of the size of the
            run's previews. For pictures it is found out from x, if inputs are scaled pixels.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module | None = None,
        x: Any = None,
        queries: Sequence[Query] = (),
        encode: Encode | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.run, self._model, self._encode = run, model, encode
        self.names = [shorten(name, LONGEST_NAME) for name in names]
        self._lock, self._threads = Lock(), local()
        if model is not None:
            check_model(model.eval(), run.source.weights, run.source.ledger, run.steps)
        elif x is not None or encode is not None:
            raise ReadingError("queries need the model that they are asked of: give model and x.")
        self._asked = None if x is None else Asked(model, x, _any_number)  # type: ignore[arg-type]
        if queries and len(queries) != len(self):
            raise ReadingError(
                f"got {len(queries)} queries, but x has {len(self)}; give one Query each, or none."
            )
        self._queries = queries or [Query(f"query {at}") for at in range(len(self))]

    def __len__(self) -> int:
        return 0 if self._asked is None else self._asked.count

    def subject(self, name: str) -> Subject:
        """The query of a name; see `Subject.name`."""
        kind, separated, rest = name.partition(":")
        if not separated:
            return self._given(name)
        if kind == "sample":
            return self._sample(self.run.sample_id(rest))
        if kind == "text":
            return self._made(name, typed_text(rest))
        if kind == "image" and self.image is not None:
            return self._made(name, decoded_image(rest, self.image))
        raise ReadingError(
            f"query '{shorten(name, 40)}': give the number of a query, 'sample:ID', or, where the "
            "run shows such samples, 'image:BASE64' or 'text:WORDS'."
        )

    @property
    def model(self) -> nn.Module | None:
        """A copy of the model for each thread: watching one's calls is not for two at a time."""
        if self._model is not None and not hasattr(self._threads, "model"):
            self._threads.model = copy.deepcopy(self._model)
        return getattr(self._threads, "model", None)

    @property
    def listed(self) -> int:
        """How many queries there are to choose from: those given, or else the training samples."""
        return len(self) or len(self.run.ids)

    def some(self, at: Sequence[int]) -> list[Subject]:
        """Some of the queries to choose from."""
        if len(self):
            return [self._given(str(number)) for number in at]
        return [self._sample(self.run.source.ids[number]) for number in at]

    def output_name(self, output: int, layer: str | None) -> str:
        """The name of an output of the model, which are its last layer's; else the number.

        >>> from dualform.testing import tiny_run
        >>> exhibit = Exhibit(*tiny_run(), names=["yes", "no"])
        >>> exhibit.output_name(1, None), exhibit.output_name(1, "first")
        ("'no'", '1')
        """
        is_named = layer in (None, *self.run.layers[-1:]) and output < len(self.names)
        return f"'{self.names[output]}'" if is_named else str(output)

    def inputs(self, count: int) -> Any:
        """The first so many queries, as the model is called with them."""
        assert self._asked is not None
        return self._asked.inputs(range(count))

    def words(self, at: int) -> str:
        """What a query can be searched by, in lower case."""
        query = self._queries[at] if len(self) else self.some([at])[0].query
        text = query.preview.data if query.preview and query.preview.kind == "text" else ""
        label = "" if query.label is None else plain_label(query.label)
        return f"{query.title} {label} {text}".lower()

    def right(self, at: int) -> bool | None:
        """Whether a query's label is the class with most output; None where that is not known."""
        if not len(self) or self.predictions is None:
            return None
        return self._is_right(self._queries[at].label, self.predictions[at])

    def _is_right(self, label: Any, predicted: int | None) -> bool | None:
        """A label is the number of an output, or the name of one."""
        if predicted is None or label is None:
            return None
        if self.classes:
            return bool(predicted == plain_label(label))
        called = shorten(label, LONGEST_NAME)
        return self.names[predicted : predicted + 1] == [called] if called in self.names else None

    def card(self, subject: Subject) -> QueryCard:
        """What to show of a query, as JSON."""
        shown, predicted = subject.query, self._predicted(subject)
        title = shorten(shown.title, LONGEST_NAME)
        return {
            "query": subject.name,
            "title": title,
            "label": plain_label(shown.label),
            "predicted": predicted,
            "right": self._is_right(shown.label, predicted),
            "preview": preview_card(shown.preview, f"'{title}'"),
        }

    @cached_property
    def image(self) -> tuple[int, ...] | None:
        """The size of the run's pictures, if its samples are pictures."""
        first = self.run.samples.preview(self.run.ids[0]) if self.run.ids else None
        is_image = first is not None and first.kind == "image"
        return tuple(first.data.shape) if first is not None and is_image else None

    @cached_property
    def encode(self) -> Encode | None:
        """What the model is called with for a picture or a text, if that is known."""
        return self._encode or self._pixels

    @cached_property
    def accepts(self) -> ImageSize | AnyText | None:
        """What may be drawn, uploaded or typed, as JSON."""
        if self.encode is None:
            return None
        if self.image is None:
            return {"kind": "text"}
        height, width, *channels = self.image
        return {"kind": "image", "height": height, "width": width, "channels": (channels or [1])[0]}

    @cached_property
    def classes(self) -> bool:
        """Whether labels are numbers of the model's outputs."""
        given = {plain_label(query.label) for query in self._queries}
        labels = (given | set(self.run.samples.labels.values())) - {None}
        if not labels or self._width < 2:
            return False
        numbers = [la for la in labels if isinstance(la, int) and not isinstance(la, bool)]
        return len(numbers) == len(labels) and all(0 <= la < self._width for la in numbers)

    @cached_property
    def predictions(self) -> list[int] | None:
        """The class with most output for each given query; None where outputs are no classes."""
        if self._asked is None or self._width < 2:
            return None
        batches = torch.split(torch.arange(len(self)), TOGETHER)
        with self._lock, torch.no_grad():
            found = [self._asked.output(self._model, batch.tolist()) for batch in batches]  # type: ignore[arg-type]
        numbers: list[int] = torch.cat([output_tensor(out) for out in found]).argmax(1).tolist()
        return numbers if len(numbers) == len(self) else None

    @cached_property
    def _width(self) -> int:
        """How many classes there are; 0 where outputs are something else."""
        if self._asked is None:
            return self.run.info.layers[-1].values[0] if self.run.layers else 0
        with self._lock, torch.no_grad():
            found = output_tensor(self._asked.output(self._model, [0]))  # type: ignore[arg-type]
        return found.shape[1] if found.ndim == 2 else 0

    @cached_property
    def _pixels(self) -> Pixels | None:
        """How inputs are made of pixels, where they are."""
        given = self._asked.inputs(range(len(self))) if self._asked else None
        if not isinstance(given, Tensor) or self.image is None:
            return None
        if given[0].numel() != torch.Size(self.image).numel() or not given.is_floating_point():
            return None
        shown = [q.preview.data for q in self._queries[:FITTED] if q.preview is not None]
        alike = all(isinstance(s, Tensor) and tuple(s.shape) == self.image for s in shown)
        return (
            Pixels.fitted(given, shown) if shown and alike else Pixels.stretched(given, self.image)
        )

    def _predicted(self, subject: Subject) -> int | None:
        if subject.x is None or self._width < 2:
            return None
        if subject.name.isdecimal():
            return self.predictions[int(subject.name)] if self.predictions else None
        assert self.model is not None
        found = model_outputs(self.model, subject.x)
        return int(found[0].argmax()) if len(found) == 1 else None

    def _given(self, name: str) -> Subject:
        if not name.isdecimal() or int(name) >= len(self):
            known = f"there are queries 0 to {len(self) - 1}" if len(self) else "none were given"
            raise ReadingError(f"query '{shorten(name, 40)}' does not exist; {known}.")
        assert self._asked is not None
        at = int(name)
        shown, x = self._queries[at], self._asked.inputs([at])
        if shown.preview is None and self._pixels is not None:
            shown = Query(shown.title, shown.label, Preview("image", self._pixels.shown(x[0])))
        return Subject(name, shown, x)

    def _sample(self, sample: SampleId) -> Subject:
        samples = self.run.samples
        shown = Query(
            f"training sample {sample}", samples.labels.get(sample), samples.preview(sample)
        )
        return Subject(f"sample:{sample}", shown, sample=sample)

    def _made(self, name: str, preview: Preview) -> Subject:
        if self.encode is None:
            raise ReadingError(
                f"a {preview.kind} cannot be asked about here: nothing says what the model is "
                "called with for it; give Exhibit(…, encode=function)."
            )
        title = "your text" if preview.kind == "text" else "your picture"
        return Subject(name, Query(title, None, preview), self._encoded(preview))

    def _encoded(self, preview: Preview) -> Any:
        """What the model is called with; a user's function may fail in any way."""
        assert self.encode is not None
        try:
            return self.encode(preview)
        except DualformError:
            raise
        except Exception as error:
            raise ReadingError(
                f"encode cannot make an input of this {preview.kind}: {type(error).__name__}: "
                f"{error}; give another {preview.kind}, or an encode that takes it."
            ) from error


def _any_number(output: Any) -> Tensor:
    """A target for those who ask for none: they want queries one by one."""
    return output_tensor(output).flatten()[:1].sum()
