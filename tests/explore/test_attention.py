"""The page on attention: its answer is what the instruments say, and it is shown as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, expect
from tests.explore.test_contract import departures
from tests.explore.test_report import carried
from tests.explore.visits import visiting
from torch import Tensor, nn

import dualform
from dualform.diagnose import over_training
from dualform.errors import AttentionError, ReadingError
from dualform.explore import Exhibit, Explorer, contract, write_report


class RowReader(nn.Module):
    """Two blocks over the rows of a small picture."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x).mean(1))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    torch.manual_seed(0)
    model, x, y = RowReader(), torch.randn(24, 6, 8), torch.arange(24) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    path = tmp_path_factory.mktemp("runs") / "reader"
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(4):
            ids = range(6 * step, 6 * step + 6)
            recorder.samples(ids)
            nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Exhibit(dualform.open(path), model.eval(), x[:20])


def test_the_view_is_what_the_instruments_say(reader: Exhibit) -> None:
    explorer = Explorer(reader)
    found = explorer.view("attention", {})
    assert not list(departures(found, contract.AttentionView))
    assert explorer.view("run", {})["attention"] is True
    assert reader.model is not None
    expected = over_training(reader.run, reader.model, reader.inputs(16))
    assert found["steps"] == list(expected.steps) == [0, 1, 2, 3, 4]
    assert found["queries"] == 16
    for at, block in enumerate(found["blocks"]):
        layers = [report.collapse.layers[at] for report in expected.reports]
        assert block["relative"] == [one.spread.relative for one in layers]
        assert block["contraction"] == [one.contraction for one in layers]
        for head in block["heads"]:
            own = [r.heads.heads[2 * at + head["head"]] for r in expected.reports if r.heads]
            assert head["overlap"] == [one.overlap for one in own]
            assert head["share"] == [one.share for one in own]
            assert head["twin"] == own[-1].twin
    assert found["findings"][: len(expected.findings)] == list(expected.findings)


def test_without_a_transformer_there_is_no_such_page(digits: Exhibit, tmp_path: Path) -> None:
    assert Explorer(digits).view("run", {})["attention"] is False
    with pytest.raises(AttentionError, match="no self-attention was seen in the forward pass"):
        Explorer(digits).view("attention", {})
    with pytest.raises(ReadingError, match="give --model and --input, or view"):
        Explorer(Exhibit(digits.run)).view("attention", {})
    assert carried(write_report(digits, tmp_path / "report.html", ["0"]))["attention"] is None


def test_the_page_shows_it_and_a_report_carries_it(
    reader: Exhibit, digits: Exhibit, browser: Browser, tmp_path: Path
) -> None:
    page, answer = write_report(reader, tmp_path / "r.html", ["0"]), Explorer(reader)
    found = answer.view("attention", {})
    assert carried(page)["attention"] == found
    with visiting(browser, page.as_uri(), offline=True) as visit:
        visit.go("/books")
        visit.at("page-attention").click()
        expect(visit.at("attention-findings").locator("li").first).to_have_text(
            found["findings"][0]
        )
        assert visit.values("[data-testid=tokens] data") == [
            value for block in found["blocks"] for value in block["relative"]
        ]
        assert visit.values("[data-testid=overlaps] data") == [
            value
            for block in found["blocks"]
            for head in block["heads"]
            for value in head["overlap"]
        ]
    other = write_report(digits, tmp_path / "d.html", ["0"])
    with visiting(browser, other.as_uri(), offline=True) as visit:
        visit.go("/books")
        expect(visit.at("page-books")).to_be_visible()
        expect(visit.at("page-attention")).to_have_count(0)
