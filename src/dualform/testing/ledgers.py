"""The contract of a ledger: what is committed can be read, and nothing else is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualform.errors import LedgerError, RunExistsError, RunLockedError
from dualform.ledger import ShardBlock


def block(first: int, last: int) -> ShardBlock:
    """Steps `first` to `last`, two rows each, whose keys say which step they belong to."""
    numbers = torch.arange(first, last + 1, dtype=torch.float32).repeat_interleave(2)
    states = torch.ones(last - first + 1, 1, dtype=torch.uint8)
    return ShardBlock(first, last, {"fc/keys": [numbers[:, None]], "states": [states]})


class LedgerContract(ABC):
    """Inherit, write `create`, `resume` and `read`, and the whole suite runs on your ledger.

    ```python
    class TestFolder(LedgerContract):
        def create(self, path, initial): return LedgerWriter.create(path, RunInfo(), initial)
        def resume(self, path, step): return LedgerWriter.resume(path, step)
        def read(self, path): return Ledger(path)
    ```
    """

    @abstractmethod
    def create(self, path: Path, initial: dict[str, Tensor]) -> Any:
        """A writer of a new run."""

    @abstractmethod
    def resume(self, path: Path, step: int) -> Any:
        """A writer that goes on with a run."""

    @abstractmethod
    def read(self, path: Path) -> Any:
        """A reader of what is committed."""

    def test_round_trip(self, tmp_path: Path) -> None:
        """What was written is read, in order, over several shards."""
        writer = self.create(tmp_path / "run", {"w": torch.zeros(2)})
        for first, last in ((1, 3), (4, 4), (5, 9)):
            writer.append(block(first, last))
            writer.flush()
        writer.close()
        ledger = self.read(tmp_path / "run")
        assert ledger.last_step == 9
        assert ledger.column("fc/keys")[::2, 0].tolist() == list(range(1, 10))
        assert list(ledger.check()) == []

    def test_uncommitted_is_invisible(self, tmp_path: Path) -> None:
        """A block that was not flushed does not exist for readers."""
        writer = self.create(tmp_path / "run", {"w": torch.zeros(2)})
        writer.append(block(1, 2))
        writer.flush()
        writer.append(block(3, 4))
        assert self.read(tmp_path / "run").last_step == 2
        writer.abandon()
        assert self.read(tmp_path / "run").last_step == 2

    def test_weights_are_kept(self, tmp_path: Path) -> None:
        """Weights come back bit by bit, those of the start and those of marked steps."""
        writer = self.create(tmp_path / "run", {"w": torch.tensor([1.0, 2.0])})
        writer.append(block(1, 2))
        writer.weights(2, {"w": torch.tensor([3.0, 4.0])}, "checkpoint")
        writer.close()
        ledger = self.read(tmp_path / "run")
        assert ledger.kept_steps == [0, 2]
        assert ledger.weights(0)["w"].tolist() == [1.0, 2.0]
        assert ledger.weights(2)["w"].tolist() == [3.0, 4.0]
        with pytest.raises(ValueError, match=r"weights of step 1 were not kept; those of \[0, 2\]"):
            ledger.weights(1)

    def test_resume_truncates(self, tmp_path: Path) -> None:
        """Going on from an earlier step voids what lay beyond it, and counts nothing twice."""
        writer = self.create(tmp_path / "run", {"w": torch.zeros(2)})
        for first, last in ((1, 3), (4, 6)):
            writer.append(block(first, last))
            writer.flush()
        writer.close()
        writer = self.resume(tmp_path / "run", 3)
        assert self.read(tmp_path / "run").last_step == 3
        writer.append(block(4, 5))
        writer.close()
        ledger = self.read(tmp_path / "run")
        assert ledger.column("fc/keys")[::2, 0].tolist() == [1, 2, 3, 4, 5]

    def test_one_writer_at_a_time(self, tmp_path: Path) -> None:
        """A second writer is turned away, and told why."""
        writer = self.create(tmp_path / "run", {"w": torch.zeros(2)})
        with pytest.raises(RunLockedError, match="another process is recording into"):
            self.resume(tmp_path / "run", 0)
        writer.close()
        self.resume(tmp_path / "run", 0).close()
        with pytest.raises(RunExistsError, match="already holds a run of 0 steps"):
            self.create(tmp_path / "run", {"w": torch.zeros(2)})

    def test_damage_is_found(self, tmp_path: Path) -> None:
        """A changed byte fails the check; a shortened file cannot be read."""
        writer = self.create(tmp_path / "run", {"w": torch.zeros(2)})
        writer.append(block(1, 2))
        writer.close()
        shard = self.read(tmp_path / "run").shards[0].path
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        ((path, problem),) = self.read(tmp_path / "run").check()
        assert path == shard
        assert "checksum does not match" in problem
        shard.write_bytes(data[:-1])
        with pytest.raises(LedgerError, match="its log says"):
            self.read(tmp_path / "run").column("fc/keys")
