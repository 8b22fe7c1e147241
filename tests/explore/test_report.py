"""The report as people meet it: opened from disk in a real browser, with the network off."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dualform
from dualform.errors import ReadingError, UnknownLayerError
from dualform.explore import Query, write_report
from dualform.explore.amounts import Scale
from dualform.explore.figures import block_figure, label_groups, line_figure
from dualform.ledger.samples import Preview
from dualform.read import Reading, Run

HOSTILE = "</script><img src=x onerror=alert(1)>"
PHONE, DESKTOP = 360, 1280


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail(
            "the report's tests need a browser: install Debian's `chromium`, as .ci/run does"
        )
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class Visit:
    """A report in the browser, and everything it did that it should not."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_text_contents()]

    def values(self, selector: str) -> list[float]:
        read = "all => all.map(element => Number(element.value))"
        return [float(value) for value in self.page.locator(selector).evaluate_all(read)]

    def check(self) -> None:
        """Nothing was fetched, nothing ran, nothing is off the screen."""
        fetched = [url for url in self.requests if not url.startswith("data:")]
        assert [url[:7] for url in fetched] == ["file://"]
        assert self.complaints == []
        assert self.page.locator("script, [style], [onerror]").count() == 0
        wide = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0


@pytest.fixture
def visit(browser: Browser) -> Iterator[Any]:
    contexts = []

    def go(path: Path, width: int = DESKTOP) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        contexts.append(context)
        seen = Visit(context.new_page())
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        for event in ("console", "pageerror", "dialog"):
            seen.page.on(event, lambda complaint: seen.complaints.append(str(complaint)))
        seen.page.goto(path.as_uri())
        return seen

    yield go
    for context in contexts:
        context.close()


@dataclass
class Trained:
    """A small run and the model that came out of it."""

    run: Run
    model: nn.Module
    inputs: Tensor

    def reading(self, count: int = 2, layer: str = "2") -> Reading:
        return self.run.spotlight(self.model, self.inputs[:count])[layer]


def network(inputs: int = 6, outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def train(
    path: Path, inputs: Tensor, targets: Tensor, ids: Any = None, batch: int = 20, **shown: Any
) -> Trained:
    model = network(inputs.shape[1], int(targets.max()) + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = list(range(len(inputs))) if ids is None else list(ids)
    with dualform.record(model, optimizer, path) as recorder:
        recorder.describe(names, **shown)
        for _ in range(3):
            for at in range(0, len(inputs), batch):
                recorder.samples(names[at : at + batch])
                chosen = slice(at, at + batch)
                nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return Trained(dualform.open(path), model, inputs)


def random_data() -> tuple[Tensor, Tensor]:
    noise, targets = torch.randn(60, 6, generator=torch.manual_seed(1)), torch.arange(60) % 4
    return noise + 2 * nn.functional.one_hot(targets, 6), targets


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    inputs, targets = random_data()
    return train(tmp_path_factory.mktemp("report") / "small", inputs, targets, labels=targets)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    data = load_digits()
    inputs = torch.tensor(data.data / 16, dtype=torch.float32)
    targets = torch.tensor(data.target)
    path = tmp_path_factory.mktemp("report") / "digits"
    seen, labels = inputs[:1400], targets[:1400]
    trained = train(path, seen, labels, batch=50, labels=labels, previews=seen.reshape(-1, 8, 8))
    return Trained(trained.run, trained.model, inputs[1400:])


@pytest.fixture(scope="module")
def digits_report(digits: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight queries; the second is given a label other than what is predicted."""
    predicted = digits.model(digits.inputs[:8]).argmax(1)
    labels = [predicted[0], (predicted[1] + 1) % 10, *predicted[2:]]
    pixels = (digits.inputs[:8].reshape(-1, 8, 8) * 255).round().to(torch.uint8)
    queries = [
        Query(f"test digit {at}", label, Preview("image", image))
        for at, (label, image) in enumerate(zip(labels, pixels, strict=True))
    ]
    path = tmp_path_factory.mktemp("report") / "new" / "folders" / "report.html"
    return write_report(digits.run, digits.reading(8), path, queries)


def shows(text: str, value: float) -> bool:
    """Whether a displayed number is the value, rounded to the digits that are displayed."""
    number = text.replace("−", "-").replace(",", "")
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(float(number) - value) <= 0.5000001 * 10.0**-decimals


def test_numbers_are_those_of_the_api(visit: Any, digits: Trained, digits_report: Path) -> None:
    seen, reading = visit(digits_report), digits.reading(8)
    sums = reading.by("label")
    for at in range(8):
        section = f"#query-{at + 1}"
        parts = reading.check.lines(at)
        del parts["booked by step"]  # zero, so it is not shown
        assert seen.values(f"{section} .equation data") == list(parts.values())
        assert seen.values(f"{section} .answer data") == [reading.total[at]]
        for side, ranking in ((1, reading.top(12)), (2, reading.bottom(12))):
            table = f"{section} .side:nth-child({side}) .evidence"
            rows = ranking.rows[at * 12 : at * 12 + 12]
            assert seen.values(f"{table} data") == [row.value for row in rows]
            assert seen.texts(f"{table} .name") == [str(row.id) for row in rows]
            assert seen.texts(f"{table} .card .small bdi") == [str(row.label) for row in rows]
        shown = seen.texts(f"{section} text.sum")
        assert all(shows(text, sum_) for text, sum_ in zip(shown, sums.values[:, at], strict=True))
    seen.check()


def test_displayed_numbers_are_rounded_from_the_exact_ones(visit: Any, digits_report: Path) -> None:
    seen = visit(digits_report)
    texts, values = seen.texts("data"), seen.values("data")
    assert len(texts) > 200
    assert all(shows(text, value) for text, value in zip(texts, values, strict=True))
    words = " ".join(seen.texts("#query-1 .equation")[0].split())
    number = r"[+−][\d.]+(e-\d+)?"
    expected = rf"initial {number} \+ sum over 1,400 examples {number} \+ remainder {number} = "
    assert re.fullmatch(expected + rf"output \d {number}", words)


def test_right_and_wrong(visit: Any, digits: Trained, digits_report: Path) -> None:
    seen = visit(digits_report)
    assert seen.texts("#query-1 .verdict") == ["✓ right"]
    assert seen.texts("#query-2 .verdict") == ["✗ wrong"]
    predicted = int(digits.model(digits.inputs[:1]).argmax())
    assert seen.texts("#query-1 .truth")[0].split()[:2] == ["predicted:", str(predicted)]
    assert seen.texts("#query-1 text.label.own") == [str(predicted)]


def test_navigation_jumps(visit: Any, digits_report: Path) -> None:
    seen = visit(digits_report)
    assert seen.page.locator("nav a img").count() == 8
    seen.page.locator("nav a").nth(6).click()
    assert seen.page.url.endswith("#query-7")
    assert abs(seen.page.locator("#query-7").bounding_box()["y"]) < 5


def test_pictures_are_the_pixels(visit: Any, digits: Trained, digits_report: Path) -> None:
    read = """image => {
        const context = document.createElement("canvas").getContext("2d");
        context.drawImage(image, 0, 0);
        return Array.from(context.getImageData(0, 0, 8, 8).data);
    }"""
    pixels = visit(digits_report).page.locator("#query-3 .large img").evaluate(read)
    expected = (digits.inputs[2] * 255).round().to(torch.uint8)
    assert torch.equal(torch.tensor(pixels, dtype=torch.uint8)[::4], expected)


def test_audit_is_the_runs(visit: Any, digits: Trained, digits_report: Path) -> None:
    seen, audit = visit(digits_report), digits.run.audit()
    rows = [row.split() for row in seen.texts(".books tbody tr")]
    for row, book in zip(rows, audit.books, strict=True):
        shape = "×".join(map(str, book.shape))
        assert row[:5] == [book.name, shape, "row", f"{book.rows:,}", f"{book.remainder:.1e}"]
    facts = seen.texts("footer dd")
    assert "SGD" in facts
    assert any("lr 0.1, momentum 0.9" in fact for fact in facts)


def test_size_and_privacy(digits: Trained, digits_report: Path) -> None:
    text = digits_report.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert str(digits.run.path.parent) not in text
    assert "digits" in text
    assert [path.name for path in digits_report.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("width", [PHONE, 2560])
def test_fits_the_screen(visit: Any, digits_report: Path, width: int) -> None:
    seen = visit(digits_report, width)
    seen.check()
    boxes = [text.bounding_box() for text in seen.page.locator("#query-1 text.sum").all()]
    for left, right in zip(boxes, boxes[2:], strict=False):  # neighbors stand at two heights
        assert left["x"] + left["width"] <= right["x"]


def test_strangers_texts_stay_texts(visit: Any, tmp_path: Path) -> None:
    inputs, targets = random_data()
    ids = [f"{HOSTILE}{at}" for at in range(60)]
    labels, texts = [HOSTILE, "kind", *["plain"] * 58], [f"{HOSTILE} {at}" for at in range(60)]
    folder = tmp_path / "run <img src=y onerror=alert(2)>"
    trained = train(folder, inputs, targets, ids, labels=labels, previews=texts)
    spoil_metadata(folder)
    trained = Trained(dualform.open(folder), trained.model, inputs)
    queries = [Query(HOSTILE, HOSTILE, Preview("text", HOSTILE)), Query("\ud800 half a character")]
    path = write_report(trained.run, trained.reading(), tmp_path / "report.html", queries)
    for width in (DESKTOP, PHONE):
        seen = visit(path, width)
        assert seen.texts("#query-1 h2") == [HOSTILE]
        assert seen.texts("#query-1 .large q") == [HOSTILE]
        assert all(HOSTILE in text for text in seen.texts(".evidence .name"))
        assert HOSTILE in seen.texts("footer dd")
        assert seen.page.locator("img").count() == 0
        seen.check()


def spoil_metadata(folder: Path) -> None:
    description = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    stranger = {"optimizer": HOSTILE, "settings": [{HOSTILE: HOSTILE}, 3], "versions": HOSTILE}
    description["metadata"].update(stranger, created={HOSTILE: [HOSTILE]})
    (folder / "run.json").write_text(json.dumps(description), encoding="utf-8")


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"previews": [f"a review that goes on for a while, number {at}" for at in range(60)]},
        {"previews": random_data()[0]},
        {"labels": ["golden retriever", "cat", "an unusually long name"] * 20},
        {"labels": list(range(60)), "previews": torch.rand(60, 5, 7, 3)},
    ],
    ids=["bare", "texts", "numbers", "string labels", "many labels, color images"],
)
def test_whatever_was_described(visit: Any, tmp_path: Path, description: dict[str, Any]) -> None:
    trained = train(tmp_path / "run", *random_data(), **description)
    reading = trained.reading()
    stored = trained.run.samples.preview(7)
    queries = [Query("one", preview=stored), Query("two")] if stored else []
    path = write_report(trained.run, reading, tmp_path / "report.html", queries)
    visit(path, PHONE).check()
    seen = visit(path)
    assert seen.texts("main h2")[:2] == (["one", "two"] if stored else reading.names)
    thumbnails = len(seen.texts(".evidence tbody tr")) if stored else 0
    assert seen.page.locator(".evidence .thumbnail").count() == thumbnails
    assert seen.page.locator(".large").count() == bool(stored)
    assert seen.texts(".verdict") == []
    heading = "By class, sorted" if "labels" in description else "All examples, sorted"
    assert seen.texts("#query-1 .plot h3")[0] == heading
    seen.check()


def test_hidden_layers_have_no_classes(visit: Any, small: Trained, tmp_path: Path) -> None:
    queries, reading = [Query("one", 1), Query("two", 2)], small.reading(layer="0")
    seen = visit(write_report(small.run, reading, tmp_path / "report.html", queries))
    assert seen.texts(".verdict") == []
    assert seen.texts(".own") == []
    assert seen.texts("#query-1 .truth span")[0].startswith("largest output:")


@pytest.mark.parametrize("step", [0, 4])
def test_earlier_steps(visit: Any, small: Trained, tmp_path: Path, step: int) -> None:
    run, model = small.run.at(step), network()
    model.load_state_dict(run.state_dict())
    reading = run.spotlight(model, small.inputs[:1])["2"]
    seen = visit(write_report(run, reading, tmp_path / "report.html"))
    assert seen.texts(".key-facts dd")[1::2] == [str(step), "not measured" if step else "0.0e+00"]
    seen.check()


def test_directions_and_whole_steps(visit: Any, tmp_path: Path) -> None:
    """A gradient that is not the rows' own is booked by step, and shows in the equation."""
    model, inputs = nn.Linear(6, 4), random_data()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for noise in (0.0, 0.1, 0.1):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            model.weight.grad.add_(noise * torch.randn(4, 6))
            optimizer.step()
            recorder.checkpoint()  # waits until the step is settled, so that the next one knows
    run = dualform.open(tmp_path / "run")
    direction = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    reading = run.spotlight(model, inputs[:1], direction)["model"]
    seen = visit(write_report(run, reading, tmp_path / "report.html"))
    assert seen.texts(".answer")[0].startswith("a direction = ")
    assert seen.values(".equation data") == list(reading.check.lines(0).values())
    assert "booked by step" in seen.texts(".equation .small")
    assert "row, then step" in seen.texts(".books tbody tr:first-child td:nth-child(3)")[0]
    seen.check()


def test_mistakes_are_explained(small: Trained, tmp_path: Path) -> None:
    reading, path = small.reading(3), tmp_path / "r.html"
    with pytest.raises(ReadingError, match="got 1 queries, but the reading of layer '2' has 3"):
        write_report(small.run, reading, path, [Query("one")])
    with pytest.raises(ReadingError, match=r"at step 9, the report of run '.*' at step 5; give"):
        write_report(small.run.at(5), reading, path)
    with pytest.raises(ReadingError, match="is a folder; give a file"):
        write_report(small.run, reading, tmp_path)
    previews = {
        r"of 'q' is torch.float32 \(2, 2\); expected a torch.uint8": ("image", torch.rand(2, 2)),
        "of 'q' is str; expected a torch.uint8 tensor": ("image", "a path"),
        "kind 'sound'; previews are of kind 'image', 'text' or 'numbers'": ("sound", None),
    }
    for message, preview in previews.items():
        with pytest.raises(ReadingError, match=message):
            write_report(small.run, small.reading(1), path, [Query("q", None, Preview(*preview))])
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_draw_is_explained(small: Trained, tmp_path: Path) -> None:
    strange = Trained(small.run, small.model, torch.full((1, 6), float("nan")))
    with dualform.record(small.model, torch.optim.SGD(small.model.parameters()), tmp_path / "e"):
        pass
    empty = Trained(dualform.open(tmp_path / "e"), small.model, small.inputs)
    with pytest.raises(ReadingError, match="NaN or infinite contributions"):
        write_report(small.run, strange.reading(1), tmp_path / "r.html")
    with pytest.raises(ReadingError, match="has no queries"):
        write_report(small.run, small.reading(0), tmp_path / "r.html")
    with pytest.raises(UnknownLayerError, match="it recorded no layer by row"):
        empty.reading()


def test_large_figures_are_thinned() -> None:
    values = np.sin(np.arange(60_000.0))
    groups = label_groups(range(60_000), {at: at % 30 for at in range(60_000)})
    figure = block_figure(values, groups, asked=17)
    assert (len(figure.blocks), figure.merged) == (12, 19)
    assert [block.asked for block in figure.blocks if block.name == "17"] == [True]
    assert all((block.above + block.below).count("H") <= 200 for block in figure.blocks)
    assert sum(block.count for block in figure.blocks) == 60_000
    assert sum(block.sum.value for block in figure.blocks) == pytest.approx(values.sum())
    line = line_figure(values, np.repeat(np.arange(1, 101), 600))
    assert (line.line.count("L"), len(line.epochs)) == (399, 12)


@pytest.mark.parametrize("value", [0.0, 1e-12, -3.4e-5, 0.04, 9.996, -123456.7, 8.1e9])
def test_amounts_show_their_value(value: float) -> None:
    assert shows(Scale([value]).signed(value).text, value)
    assert shows(Scale([10 * value, value]).plain(value).text, value)
