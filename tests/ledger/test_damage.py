"""Whatever happens to a run's logs is said: no altered, lost or foreign file passes in silence."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger.damaging import INFO, flip, logs, record
from tests.ledger.fuzz import record_run

import dualform
from dualform.errors import CorruptError, DualformError
from dualform.ledger import Ledger, LedgerWriter


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two writers, 5 steps and 7, that were both closed."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    record(path, 1, 5)
    record(path, 6, 12)
    return path


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def assert_refused(path: Path, damaged: Path) -> None:
    """Opening fails and names the file; what can still be read is the run, and says so too."""
    with pytest.raises(CorruptError, match=damaged.name):
        Ledger(path)
    try:
        left = Ledger(path, damaged=True)
    except CorruptError as error:
        assert "has no log that says how it began" in str(error)  # noqa: PT017
        return
    assert damaged in [file for file, _ in left.check()]
    steps = left.column("fc/keys")[::2].flatten().tolist()
    assert steps == list(range(1, left.last_step + 1))


@pytest.mark.parametrize("count", [-1e30, 1e30, float("nan")])
def test_a_count_of_steps_that_cannot_be_is_refused(tmp_path: Path, count: float) -> None:
    """It would be an exponent, and overflow."""
    path = tmp_path / "run"
    record_run(path)
    ledger = Ledger(path)
    kept = ledger.kept(3)
    at = kept.arrays["state:step:0.one.weight"]
    data = bytearray(kept.path.read_bytes())
    data[at.offset : at.offset + 4] = struct.pack("<f", count)
    kept.path.write_bytes(data)
    run = dualform.open(path)
    with pytest.raises(CorruptError, match=r"had step = .* of '0.one.weight'; restore the file"):
        run.audit()


anywhere = st.integers(0, 10_000)


@given(which=st.integers(0, 1), at=anywhere, bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_one_flipped_bit_of_a_log_is_named(finished: Path, which: int, at: int, bit: int) -> None:
    with TemporaryDirectory() as folder:
        path = shutil.copytree(finished, Path(folder) / "run")
        log = logs(path)[which]
        log.write_bytes(flip(log.read_bytes(), at, bit))
        assert_refused(path, log)


@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_line_is_named(which: int, finished: Path, tmp_path: Path) -> None:
    """Any line of any log, the start and the last one among them."""
    lines = logs(finished)[which].read_bytes().splitlines(keepends=True)
    for lost in range(len(lines)):
        path = shutil.copytree(finished, tmp_path / f"without-{lost}")
        log = logs(path)[which]
        log.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
        assert_refused(path, log)


@pytest.mark.parametrize("which", [0, 1])
def test_a_log_that_was_cut_short_is_named(which: int, finished: Path, tmp_path: Path) -> None:
    """At the end of any line, as a copy that broke off leaves it."""
    lines = logs(finished)[which].read_bytes().splitlines(keepends=True)
    for left in range(len(lines)):
        path = shutil.copytree(finished, tmp_path / f"first-{left}")
        log = logs(path)[which]
        log.write_bytes(b"".join(lines[:left]))
        assert_refused(path, log)


@pytest.mark.parametrize("which", [0, 1])
def test_swapped_lines_are_named(which: int, copy: Path) -> None:
    log = logs(copy)[which]
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))
    assert_refused(copy, log)


@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_folder_is_named(which: int, copy: Path) -> None:
    log = logs(copy)[which]
    shutil.rmtree(log.parent)
    assert_refused(copy, log)


@pytest.mark.parametrize("which", [0, 1])
def test_a_log_of_another_run_is_named(which: int, copy: Path, tmp_path: Path) -> None:
    record(tmp_path / "other", 1, 4)
    record(tmp_path / "other", 5, 12)
    log = logs(copy)[which]
    shutil.copy(logs(tmp_path / "other")[which], log)
    with pytest.raises(CorruptError, match=r"is damaged: .*commits\.jsonl"):
        Ledger(copy)


def test_the_message_says_what_to_do(copy: Path) -> None:
    log = logs(copy)[1]
    log.write_bytes(flip(log.read_bytes(), log.read_bytes().index(b'"first":8') + 8))
    message = (
        r"the run '.*' is damaged: '.*commits\.jsonl' is altered: the seal of line 4 does not fit "
        r"\(and 1 more\)\. Restore it from a copy; what is left of it, 7 steps, is read by "
        r"dualform\.open\(path, damaged=True\), and copied by `dualform repair`\."
    )
    with pytest.raises(CorruptError, match=message):
        dualform.open(copy)
    left = dualform.open(copy, damaged=True)
    assert left.steps == 7
    assert "steps 8 to 8 are missing" in left.check()[1]
    with pytest.raises(CorruptError, match="Restore it from a copy"):
        LedgerWriter.resume(copy, 5)


def test_a_lost_line_of_weights_costs_no_step(copy: Path) -> None:
    """What is left of a damaged run is everything that still has a seal."""
    log = logs(copy)[0]
    log.write_bytes(flip(log.read_bytes(), -3))
    left = Ledger(copy, damaged=True)
    assert (left.last_step, left.kept_steps) == (12, [0, 12])


@given(cut=anywhere)
@settings(max_examples=60, deadline=None)
def test_a_torn_log_keeps_what_came_before(cut: int) -> None:
    """Wherever a killed process broke off, the whole lines before it count; nothing is damaged."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        log = record(path, 1, 5, killed=True)
        data = log.read_bytes()
        cut %= len(data) + 1
        log.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        if not whole:
            with pytest.raises(CorruptError, match="has no log that says how it began"):
                Ledger(path)
            return
        ledger = Ledger(path)
        assert ledger.unfinished
        assert ledger.last_step == min(5, whole - 1)
        assert len(ledger.column("fc/keys")) == 2 * ledger.last_step
        assert list(ledger.check()) == []


def test_a_killed_writer_may_be_followed_by_another(tmp_path: Path) -> None:
    """The next one notes where the torn log ended, and from then on that is known."""
    path = tmp_path / "run"
    log = record(path, 1, 5, killed=True)
    log.write_bytes(log.read_bytes() + b'{"kind":"ro')
    record(path, 6, 7)
    ledger = Ledger(path)
    assert (ledger.last_step, ledger.unfinished, list(ledger.check())) == (7, False, [])
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-2]))
    assert_refused(path, log)


def test_a_writer_that_was_killed_before_it_began(tmp_path: Path) -> None:
    """Its folder is empty or holds half a start: it committed nothing, and others go on."""
    path = tmp_path / "run"
    record(path, 1, 5)
    for number, start in ((2, None), (3, b""), (4, b'{"kind":"st')):
        (path / f"writer-000{number}-rank0-00000000").mkdir()
        if start is not None:
            (path / f"writer-000{number}-rank0-00000000" / "commits.jsonl").write_bytes(start)
        assert Ledger(path).last_step == 5
    record(path, 6, 7)
    assert list(Ledger(path).check()) == []


def test_a_log_that_is_gone_but_its_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, 1, 5)
    log = record(path, 6, 7, killed=True)
    log.unlink()
    with pytest.raises(CorruptError, match="is missing, and files that it vouched for are there"):
        Ledger(path)


@given(at=anywhere, bit=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_one_flipped_bit_of_the_end_is_named(finished: Path, at: int, bit: int) -> None:
    with TemporaryDirectory() as folder:
        path = shutil.copytree(finished, Path(folder) / "run")
        end = path / "end-0.json"
        end.write_bytes(flip(end.read_bytes(), at, bit))
        assert_refused(path, end)


def test_without_its_end_a_run_looks_like_one_that_was_killed(copy: Path) -> None:
    (copy / "end-0.json").unlink()
    assert Ledger(copy).unfinished
    assert Ledger(copy).last_step == 12


@given(at=anywhere, bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_one_flipped_bit_of_the_description_is_named(finished: Path, at: int, bit: int) -> None:
    """Or it is in what the description tells people, which no sum depends on."""
    with TemporaryDirectory() as folder:
        path = shutil.copytree(finished, Path(folder) / "run")
        file = path / "run.json"
        file.write_bytes(flip(file.read_bytes(), at, bit))
        try:
            info = Ledger(path).info
        except DualformError as error:
            assert "run.json" in str(error) or "format" in str(error)  # noqa: PT017
            return
        assert (info.books, info.rule, info.fields) == (INFO.books, INFO.rule, INFO.fields)


@given(at=anywhere, bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_one_flipped_bit_of_a_header_is_named(finished: Path, at: int, bit: int) -> None:
    """Of a shard and of weights: the names and places of arrays are checked before any is read."""
    with TemporaryDirectory() as folder:
        path = shutil.copytree(finished, Path(folder) / "run")
        ledger = Ledger(path)
        (shard, *_), initial = ledger.shards, path / "initial.safetensors"
        for file, read in (
            (shard.path, lambda: shard.file),
            (initial, lambda: Ledger(path).kept(0)),
        ):
            data = file.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            file.write_bytes(flip(data, at % (8 + length), bit))
            with pytest.raises(CorruptError, match=file.name):
                read()


@given(at=anywhere, bit=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_one_flipped_bit_of_an_index_is_named(finished: Path, at: int, bit: int) -> None:
    """What says where rows lie and how they count is checked before it is relied on."""
    with TemporaryDirectory() as folder:
        path = shutil.copytree(finished, Path(folder) / "run")
        shard = Ledger(path).shards[0]
        entry, data = shard.file.arrays["states"], shard.path.read_bytes()
        shard.path.write_bytes(flip(data, entry.offset + at % entry.nbytes, bit))
        with pytest.raises(CorruptError, match="is altered: its index's checksum does not match"):
            Ledger(path).column("states")


def test_a_copied_writer_s_folder_is_not_another_writer(copy: Path) -> None:
    log = logs(copy)[1]
    shutil.copytree(log.parent, copy / f"{log.parent.name} (copy)")
    assert (Ledger(copy).last_step, list(Ledger(copy).check())) == (12, [])
    record(copy, 13, 14)
    assert Ledger(copy).last_step == 14


def test_an_array_that_is_missing_is_named(tmp_path: Path) -> None:
    record(tmp_path / "run", 1, 2)
    with pytest.raises(CorruptError, match="has no array 'hyper'; restore the file from a copy"):
        Ledger(tmp_path / "run").shards[0].file.read("hyper")
