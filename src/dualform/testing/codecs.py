"""The contract of a codec: what it keeps of rows comes back, and what it loses is the residual."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.ledger.codecs import Codec, Records, read_codec
from dualform.ledger.codecs.codec import FLOATS
from dualform.recording.recorder import Recorder

RECORDS, KEYS, VALUES = 7, 5, 3


def some_records(dtype: torch.dtype, places: bool = False) -> Records:
    """Records of a type, small and large ones; their keys may be places in a table."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 3, RECORDS)[:, None]
    keys, values = (
        (sizes * torch.randn(RECORDS, width, generator=draw)).to(dtype) for width in (KEYS, VALUES)
    )
    return Records(torch.randint(99, (RECORDS, 1), generator=draw) if places else keys, values)


class CodecContract(ABC):
    """Inherit, write `kind` and `rounding`, and the whole suite runs on your codec.

    The codec must be one of `dualform.ledger.codecs.CODECS`.

    ```python
    class TestExact(CodecContract):
        def kind(self): return Exact
        def rounding(self): return 0.0
    ```
    """

    @abstractmethod
    def kind(self) -> type[Codec]:
        """The codec's class."""

    @abstractmethod
    def rounding(self) -> float:
        """By how much a decoded number may be off, relative to the largest of its row."""

    @pytest.fixture(params=[*FLOATS, "places"])
    def records(self, request: pytest.FixtureRequest) -> Records:
        """Records of every type that rows may be recorded in."""
        name = request.param
        return some_records(FLOATS.get(name, torch.float32), places=name == "places")

    def test_round_trip(self, records: Records) -> None:
        """Decoded rows are the encoded ones, up to the codec's rounding; places are exact."""
        codec = self.kind().for_records(records)
        decoded = codec.decode(codec.encode(records), 0, RECORDS)
        for before, after in zip(records, decoded, strict=True):
            assert after.shape == before.shape
            wide = before.double()
            allowed = self.rounding() * wide.abs().amax(1, keepdim=True)
            exact = not before.is_floating_point() or not codec.leaves_residual
            assert bool(((after.double() - wide).abs() <= (0.0 if exact else allowed)).all())
            assert after.dtype in (torch.float32, torch.float64, torch.int64)

    def test_a_range_is_decoded_alone(self, records: Records) -> None:
        """Some records decode to what all of them decode to at these places."""
        codec = self.kind().for_records(records)
        arrays = codec.encode(records)
        whole, part = codec.decode(arrays, 0, RECORDS), codec.decode(arrays, 2, 5)
        assert all(torch.equal(b, a[2:5]) for a, b in zip(whole, part, strict=True))

    def test_values_are_decoded_without_keys(self, records: Records) -> None:
        """The arrays of values suffice, where nobody asks for keys."""
        codec = self.kind().for_records(records)
        arrays = codec.encode(records)
        alone = codec.decode({name: arrays[name] for name in codec.value_arrays}, 0, RECORDS)
        assert torch.equal(alone.values, codec.decode(arrays, 0, RECORDS).values)
        assert alone.keys.shape == (RECORDS, 0)

    def test_bytes_are_known_before(self, records: Records) -> None:
        """`bytes_per_row` is what is stored, and arrays are as `arrays` says."""
        codec = self.kind().for_records(records)
        widths = [side.shape[1] for side in records]
        stored = codec.encode(records)
        assert sum(array.nbytes for array in stored.values()) == RECORDS * codec.bytes_per_row(
            *widths
        )
        said = codec.arrays(*widths)
        assert {name: (array.shape[1], array.dtype) for name, array in stored.items()} == said
        assert {len(array) for array in stored.values()} == {RECORDS}

    def test_a_log_declares_it(self, records: Records) -> None:
        """The declaration is JSON, and gives the same codec again."""
        codec = self.kind().for_records(records)
        assert read_codec(json.loads(json.dumps(codec.to_json()))) == codec

    def test_other_parameters_are_refused(self) -> None:
        """A declaration may come from a stranger: each parameter is there and of its type."""
        declared = self.kind().for_records(some_records(torch.float32)).to_json()
        with pytest.raises(ValueError, match="has the parameters"):
            read_codec({**declared, "unheard_of": 1})
        for parameter in fields(self.kind()):
            with pytest.raises(ValueError, match="has the parameters"):
                read_codec({n: v for n, v in declared.items() if n != parameter.name})
            senseless: Any
            for senseless in (None, [], {}, "senseless", -1.5):
                with pytest.raises(ValueError, match=parameter.name):
                    read_codec({**declared, parameter.name: senseless})

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    def test_entries_and_residual_are_the_weights(
        self, optimizer: type[torch.optim.Optimizer], tmp_path: Path
    ) -> None:
        """A recorded run balances, and its residual is nothing exactly where nothing is lost."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        stepper = optimizer(model.parameters(), lr=0.05)  # type: ignore[call-arg]
        with Recorder(model, stepper, tmp_path / "run", keep=self.kind().policy):
            for _ in range(6):
                model(torch.randn(4, 6)).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
        audit = dualform.open(tmp_path / "run").audit()
        assert audit.coverage == 1.0
        assert audit.remainder <= 2e-6
        lossy = self.kind().for_records(some_records(torch.float32)).leaves_residual
        assert all((book.residual > 0) == lossy for book in audit.books)
