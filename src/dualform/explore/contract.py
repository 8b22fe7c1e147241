"""The explorer's JSON, written once: what every view answers.

`Explorer.view(name, …)` returns one of these. The front end's types (frontend/src/contract.ts)
and the listing in docs/explorer-api.md are made from this file: see typescript.py.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

from dualform.explore.attention_contract import AttentionView

Id: TypeAlias = int | str
Label: TypeAlias = int | str
Ask: TypeAlias = Literal["layer", "network", "removed", "keys"]
SideName: TypeAlias = Literal["for", "against"]


class ImagePreview(TypedDict):
    """A picture."""

    kind: Literal["image"]
    source: str
    crisp: bool
    width: int
    height: int


class TextPreview(TypedDict):
    """A text, or the beginning of it."""

    kind: Literal["text"]
    text: str


class NumbersPreview(TypedDict):
    """A curve."""

    kind: Literal["numbers"]
    values: list[float]


PreviewCard: TypeAlias = ImagePreview | TextPreview | NumbersPreview


class ImageSize(TypedDict):
    """Pictures of this size may be drawn or uploaded."""

    kind: Literal["image"]
    height: int
    width: int
    channels: int


class AnyText(TypedDict):
    """Texts may be typed."""

    kind: Literal["text"]


class TrainingBins(TypedDict):
    """Training in parts: bin i holds the steps edges[i] + 1 to edges[i + 1]."""

    unit: Literal["epoch", "step"]
    edges: list[int]


class LayerFacts(TypedDict):
    """A recorded layer."""

    name: str
    inputs: int
    outputs: int
    rows: int
    places: int
    """Positions of a sample: tokens, patches; 1 where there are none."""
    grid: tuple[int, int] | None
    """Height and width, where the positions lie in a plane."""


class LabelCount(TypedDict):
    """How many training samples have a label."""

    label: Label
    count: int


class QuestionCard(TypedDict):
    """A question that can be asked."""

    ask: Ask
    title: str
    meaning: str
    available: bool
    why: str
    """How to make it available."""


class RunView(TypedDict):
    """GET run"""

    name: str
    runs: int
    carried: bool
    """A report: only what it carries can be asked."""
    attention: bool
    """Whether the model has attention to look at."""
    steps: int
    samples: int
    bytes: int
    bins: TrainingBins
    layers: list[LayerFacts]
    columns: list[str]
    """What samples can be grouped by; "label" is the first."""
    labels: list[LabelCount]
    classes: bool
    """Labels are numbers of outputs."""
    names: list[str]
    """What the model's outputs, and so those of the last layer, are called; empty if not known."""
    questions: list[QuestionCard]
    queries: int
    accepts: ImageSize | AnyText | None
    """What may be drawn, uploaded or typed."""
    facts: dict[str, str]


class QueryCard(TypedDict):
    """A query that can be asked about."""

    query: str
    """As the parameter `query` names it."""
    title: str
    label: Label | None
    predicted: int | None
    right: bool | None
    preview: PreviewCard | None


class QueriesView(TypedDict):
    """GET queries?search=&wrong=1&offset=0&limit=50"""

    total: int
    queries: list[QueryCard]


class OutputValue(TypedDict):
    """One output, by its number."""

    output: int
    value: float


class CheckParts(TypedDict):
    """initial + evidence + by_step + remainder = total."""

    initial: float
    evidence: float
    by_step: float
    """What belongs to no sample: changes booked by step, and what smaller entries leave."""
    remainder: float
    total: float


class SampleCard(TypedDict):
    """A training sample and its amount."""

    id: Id
    label: Label | None
    value: float
    preview: PreviewCard | None
    """In reports null: see `previews` there."""


class EvidenceCard(SampleCard, total=False):
    """A training sample among the evidence; in reports also what the pieces of its text add."""

    tokens: list[str]
    places: list[float]


class SideView(TypedDict):
    """The evidence on one side: its sum, and the first 12 samples."""

    sum: float
    count: int
    samples: list[EvidenceCard]


# "for" is a word of Python's own, so this one cannot be a class.
SideSums = TypedDict("SideSums", {"for": float, "against": float})


class GroupView(SideSums):
    """The samples of one label, or of one value of another column."""

    label: Label | None
    count: int
    sum: float
    curve: list[float]
    """Their amounts, the largest first, at most 120 points evenly taken."""


class AnswerView(TypedDict):
    """GET answer?query=&ask=&layer=&output=&place=&at=&span=&by=&label="""

    query: QueryCard
    ask: Ask
    layer: str | None
    output: int
    asked: str
    outputs: list[OutputValue]
    """Of the model, or of the layer: the largest first, at most 12."""
    check: CheckParts | None
    """Null for removed and keys, and where a span, a position or a label restricts the sums."""
    attributed: float | None
    """The share of what training changed that samples have: |evidence| / (|evidence| + |by_step|).

    Null where there is no check.
    """
    error: float | None
    """The share of what training changed that stays unexplained."""
    note: str
    """What the numbers are, in a sentence."""
    unit: str
    sides: dict[SideName, SideView]
    timeline: list[float] | None
    """One sum a bin, never restricted by a span; null for removed and keys."""
    groups: list[GroupView]
    """By label, never restricted by one; a single group without a label if there are none."""
    places: int
    place: int | None
    shared: bool
    """The positions are the model's own: the whole network can be asked at the same one."""
    marks: list[float] | None
    """The output that is asked about, at each position of the query."""
    tokens: list[str] | None
    """The query's text in one piece a position, if it can be cut so."""


class EvidenceView(TypedDict):
    """GET evidence?(as answer)&side=for|against&offset=0&limit=50"""

    total: int
    samples: list[EvidenceCard]


class Highlight(TypedDict):
    """What each piece of a text adds."""

    tokens: list[str]
    places: list[float]


class HighlightsView(TypedDict):
    """GET highlights?(as answer)&id=A&id=B…"""

    samples: dict[str, Highlight]
    """By the id of the sample, as a text; layers only."""


class LayerShare(TypedDict):
    """What was added through one layer's parameters."""

    layer: str
    value: float


class LayersView(TypedDict):
    """GET layers?query=&output=&place="""

    output: int
    shares: list[LayerShare]
    initial: float
    by_step: float
    remainder: float
    total: float


class ActsView(SampleCard):
    """GET acts?(as answer)&id=A"""

    timeline: list[float] | None
    places: list[float] | None
    """One sum a position of the training sample, where the layer has positions."""
    tokens: list[str] | None
    grid: tuple[int, int] | None


class ErrorInBin(TypedDict):
    """The mean size of a sample's error at the last layer, in one part of training."""

    bin: int
    error: float


class EffectCard(TypedDict):
    """What a sample adds to a query's prediction."""

    query: QueryCard
    output: int
    value: float


class SampleView(SampleCard):
    """GET sample?id=A"""

    visits: int
    history: list[ErrorInBin]
    suspicion: float
    rank: int
    helps: list[EffectCard]
    hurts: list[EffectCard]
    of: int
    query: str


class SuspectsView(TypedDict):
    """GET suspects?offset=0&limit=50"""

    total: int
    samples: list[EvidenceCard]


class SubtractedOutput(TypedDict):
    """The output that is asked about, without some samples."""

    output: int
    before: float
    after: float
    """An account, as the note says: before, less the samples' amounts."""
    retrained: float | None
    """An estimate: before, less their influence; null if it was not asked for or cannot be."""
    estimate: str


class SubtractView(TypedDict):
    """GET subtract?query=&ask=&layer=&output=&place=&id=A&id=B…&estimate=1"""

    ids: list[Id]
    note: str
    before: list[OutputValue]
    """Of a layer all outputs, of the network the one that is asked about."""
    after: list[OutputValue]
    asked: SubtractedOutput


class BookLine(TypedDict):
    """One parameter's book."""

    name: str
    shape: list[int]
    rows: int
    granularity: str
    reason: str
    remainder: float | None
    rounding: float | None
    residual: float | None
    """The share of its change that entries leave, where they are less than the rows."""
    by_step: float | None
    """The share of its change that was booked by step."""
    attributed: float | None
    """The share of its change that is attributed to samples: neither of the two."""
    change: float | None
    """The size of the change."""
    bytes: int


class BooksView(TypedDict):
    """GET books"""

    step: int
    measured_at: int
    remainder: float | None
    coverage: float
    attributed: float | None
    """The share of the change of all parameters that is attributed to samples."""
    verdict: str
    """Whether rounding can be all that is missing; empty where little is."""
    bytes: int
    books: list[BookLine]


class Views(TypedDict):
    """What each view answers."""

    run: RunView
    queries: QueriesView
    answer: AnswerView
    evidence: EvidenceView
    highlights: HighlightsView
    layers: LayersView
    acts: ActsView
    sample: SampleView
    suspects: SuspectsView
    subtract: SubtractView
    books: BooksView
    attention: AttentionView
