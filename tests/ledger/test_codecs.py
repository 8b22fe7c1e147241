"""Every codec under its contract, and what a reader refuses of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualform.errors import CorruptError, FormatVersionError
from dualform.ledger import Codec, Declaration, Ledger, LedgerWriter, RunInfo, ShardBlock, Stream
from dualform.ledger.codecs import CODECS, BFloat16, Exact, Int8, Records, read_codec
from dualform.read.engine import ShardRange
from dualform.read.scan import chunks, count_rows
from dualform.testing import CodecContract


class TestExact(CodecContract):
    """Rows as they are."""

    def kind(self) -> type[Codec]:
        return Exact

    def rounding(self) -> float:
        return 0.0


class TestBFloat16(CodecContract):
    """Rows of 8 significant bits."""

    def kind(self) -> type[Codec]:
        return BFloat16

    def rounding(self) -> float:
        return 2.0**-8


class TestInt8(CodecContract):
    """Rows of 8 bits, with a scale each."""

    def kind(self) -> type[Codec]:
        return Int8

    def rounding(self) -> float:
        return 0.5 / 127 * (1 + 1e-6)


def test_every_codec_is_under_contract() -> None:
    tested = {contract().kind() for contract in CodecContract.__subclasses__()}  # type: ignore[abstract]
    assert tested == set(CODECS.values())


def test_bfloat16_takes_half_the_space_of_float32_only() -> None:
    assert BFloat16().bytes_per_row(100, 10) == Exact().bytes_per_row(100, 10) / 2
    narrow = BFloat16("float16", "bfloat16")
    assert (narrow.bytes_per_row(100, 10), narrow.leaves_residual) == (220, False)


def test_int8_keeps_the_smallest_numbers_of_a_row_and_rows_of_zeros() -> None:
    """A row whose scale is too small for its type decodes to zeros, never to NaN."""
    tiny = torch.finfo(torch.float32).tiny / 2**22
    rows = torch.tensor([[0.0, 0.0], [tiny, -tiny], [1.0, 1 / 127]])
    codec = Int8()
    keys = codec.decode(codec.encode(Records(rows, rows)), 0, 3).keys
    assert keys[:2].abs().max() <= tiny
    torch.testing.assert_close(keys[2], rows[2])


def test_codecs_have_policies_of_their_own() -> None:
    assert len({codec.policy for codec in CODECS.values()}) == len(CODECS)


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(FormatVersionError, match="codec 'zip', and this dualform knows 'exact'"):
        read_codec({"name": "zip"})


def write(path: Path, blocks: list[tuple[torch.Tensor, list[Declaration]]]) -> Ledger:
    """Steps with two rows each, as their codec encodes them."""
    writer = LedgerWriter.create(path, RunInfo(), {})
    for step, (keys, streams) in enumerate(blocks, 1):
        arrays = {"fc/keys": [keys], "fc/values": [torch.ones(2, 1).to(keys.dtype)]}
        arrays |= {"fc/segments": [torch.tensor([[step, 1, 1]])], "samples": [torch.arange(2)]}
        arrays |= {"batches": [torch.tensor([[1, 2]])]}
        writer.append(ShardBlock(step, step, arrays, streams=streams))
    writer.close()
    return Ledger(path)


STREAM = Stream("fc", (3,), (1,))


def declared(codec: Codec) -> list[Declaration]:
    return [Declaration(STREAM, {}, codec)]


def test_a_codec_may_change_on_the_way(tmp_path: Path) -> None:
    """A stream that is declared anew begins a new shard; each shard knows its codec."""
    wide, narrow = torch.full((2, 3), 1.25), torch.full((2, 3), 0.5).bfloat16()
    exact, half = declared(Exact()), declared(Exact("bfloat16", "bfloat16"))
    blocks = [(wide, exact), (wide, []), (narrow, half), (narrow, []), (wide, exact)]
    ledger = write(tmp_path / "run", blocks)
    assert [(shard.first, shard.last) for shard in ledger.shards] == [(1, 2), (3, 4), (5, 5)]
    assert [shard.codec("fc").keys for shard in ledger.shards] == ["float32", "bfloat16", "float32"]
    keys = torch.cat([c.keys[:, 0] for s in ShardRange.of(ledger, 1, 5) for c in chunks(s, STREAM)])
    assert keys.tolist() == [1.25] * 4 + [0.5] * 4 + [1.25] * 2


def test_the_same_arrays_under_another_codec_are_another_shard(tmp_path: Path) -> None:
    rows = torch.ones(2, 3).bfloat16()
    blocks = [(rows, declared(Exact("bfloat16", "bfloat16"))), (rows, declared(BFloat16()))]
    ledger = write(tmp_path / "run", blocks)
    assert [shard.codec("fc").name for shard in ledger.shards] == ["exact", "bfloat16"]


@pytest.mark.parametrize(
    ("codec", "problem"),
    [
        (Exact("float16", "float16"), "as torch.float32 of shape .*; by its codec it is"),
        (BFloat16(), "as torch.float32 of shape .*; by its codec it is torch.bfloat16"),
    ],
)
def test_arrays_that_are_not_their_codec_s_are_refused(
    codec: Codec, problem: str, tmp_path: Path
) -> None:
    ledger = write(tmp_path / "run", [(torch.ones(2, 3), declared(codec))])
    with pytest.raises(CorruptError, match=problem):
        count_rows(ledger, STREAM, 1)


def test_rows_of_another_width_are_refused(tmp_path: Path) -> None:
    ledger = write(tmp_path / "run", [(torch.ones(2, 4), declared(Exact()))])
    with pytest.raises(CorruptError, match=r"of shape \(2, 4\); by its codec .*\(2, 3\)"):
        count_rows(ledger, STREAM, 1)


def test_rows_that_nobody_declared_are_refused(tmp_path: Path) -> None:
    ledger = write(tmp_path / "run", [(torch.ones(2, 3), [])])
    with pytest.raises(CorruptError, match="does not declare the stream 'fc'"):
        count_rows(ledger, STREAM, 1)


def test_a_name_that_means_two_things_is_refused(tmp_path: Path) -> None:
    other = [Declaration(Stream("fc", (3,), (1,), shared=(1, 3)), {})]
    rows = torch.ones(2, 3)
    with pytest.raises(CorruptError, match="declares the stream 'fc' otherwise than a log before"):
        write(tmp_path / "run", [(rows, declared(Exact())), (rows, other)])
