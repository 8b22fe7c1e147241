"""Whatever happens to a run's logs is said: no altered, lost or foreign file passes in silence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualform
from dualform.errors import CorruptError, DualformError
from dualform.ledger import Book, Ledger, LedgerWriter, RunInfo, Samples
from dualform.ledger.log import seal_line
from dualform.ledger.samples import describe_samples
from dualform.ledger.tensors import TensorFile
from dualform.testing.ledgers import block

FORMAT_2 = Path(__file__).parent / "format-2"
INFO = RunInfo((Book("fc.weight", (1,), "float32"),), "sgd", ("lr",), {"model": "one layer"})


def record(path: Path, first: int, last: int, *, killed: bool = False) -> Path:
    """Steps in a log of their own, a line each, and the weights after the last; returns the log."""
    make = LedgerWriter.resume(path, first - 1) if first > 1 else None
    writer = make or LedgerWriter.create(path, INFO, {"fc.weight": torch.zeros(1)})
    for step in range(first, last + 1):
        writer.append(block(step, step))
        writer.flush()
    writer.weights(last, {"fc.weight": torch.ones(1)}, "checkpoint")
    writer.flush()
    end = path / "end.json"
    before = end.read_bytes() if end.exists() else None
    writer.close()
    if killed:  # then it could not note its end
        end.write_bytes(before) if before else end.unlink()
    return writer.folder / "commits.jsonl"


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


def logs(path: Path) -> list[Path]:
    return sorted(path.glob("writer-*/commits.jsonl"))


def flip(data: bytes, at: int, bit: int = 0) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


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
        r"dualform\.open\(path, damaged=True\)\."
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
        (path / f"writer-000{number}-00000000").mkdir()
        if start is not None:
            (path / f"writer-000{number}-00000000" / "commits.jsonl").write_bytes(start)
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
        end = path / "end.json"
        end.write_bytes(flip(end.read_bytes(), at, bit))
        assert_refused(path, end)


def test_without_its_end_a_run_looks_like_one_that_was_killed(copy: Path) -> None:
    (copy / "end.json").unlink()
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
        for file, read in ((shard.path, lambda: shard.file), (initial, lambda: ledger.kept(0))):
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
        entry, data = shard.file.entries["states"], shard.path.read_bytes()
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


class TooLong(Exception):
    """Something waited for a pipe."""


@pytest.fixture
def at_once() -> Iterator[None]:
    """Fails after ten seconds instead of waiting forever."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link(path: Path) -> None:
    moved = path.with_name(path.name + ".elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends


PLACES = [
    "run.json",
    "end.json",
    "initial.safetensors",
    "samples",
    "samples/0001.json",
    "writer-*",
    "writer-*/commits.jsonl",
    "writer-*/00000001.safetensors",
]


def read_all(path: Path) -> Any:
    ledger = Ledger(path)
    return ledger.weights(0), ledger.column("fc/keys"), Samples(path)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("put", "name"), [(link, "a symbolic link"), (pipe, "a named pipe"), (device, "a device")]
)
def test_only_plain_files_are_read(
    put: Callable[[Path], None], name: str, place: str, tmp_path: Path
) -> None:
    record(tmp_path / "run", 1, 2)
    describe_samples(tmp_path / "run", [0, 1], ["cat", "dog"])
    (entry,) = (tmp_path / "run").glob(place)
    expected = "a folder" if entry.is_dir() else "a file"
    read_all(tmp_path / "run")
    put(entry)
    with pytest.raises(CorruptError, match=f"is {name} and not {expected}; a run has only plain"):
        read_all(tmp_path / "run")


@pytest.mark.usefixtures("at_once")
def test_the_lock_is_no_link(tmp_path: Path) -> None:
    """Taking it would empty what the link leads to."""
    record(tmp_path / "run", 1, 2)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "writer.lock").unlink()
    (tmp_path / "run" / "writer.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CorruptError, match="is a symbolic link and not a file"):
        LedgerWriter.resume(tmp_path / "run", 2)
    assert (tmp_path / "precious").read_text() == "precious"


def test_overwriting_a_run_writes_through_no_link(tmp_path: Path) -> None:
    record(tmp_path / "run", 1, 2)
    (tmp_path / "precious").mkdir()
    shutil.rmtree(tmp_path / "run" / "samples")
    (tmp_path / "run" / "samples").symlink_to(tmp_path / "precious")
    LedgerWriter.create(tmp_path / "run", INFO, {}, overwrite=True).close()
    describe_samples(tmp_path / "run", [0], ["cat"])
    assert not list((tmp_path / "precious").iterdir())


DEEP = "[" * 100_000 + "]" * 100_000


def deep_description(path: Path) -> Any:
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info)[:-1] + f',"x":{DEEP}}}')
    return dualform.open(path)


def deep_line(path: Path) -> Any:
    (log,) = logs(path)
    log.write_text(log.read_text() + seal_line({"x": 0}).replace('"x":0', f'"x":{DEEP}'))
    return dualform.open(path)


def deep_header(path: Path) -> Any:
    text = f'{{"x":{DEEP}}}'.encode()
    (path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return TensorFile(path / "x.safetensors")


def deep_page(path: Path) -> Any:
    (path / "samples" / "0001.json").write_text(DEEP)
    return Samples(path)


@pytest.mark.parametrize("read", [deep_description, deep_line, deep_header, deep_page])
def test_deep_json_is_an_error_of_ours(read: Callable[[Path], Any], tmp_path: Path) -> None:
    record(tmp_path / "run", 1, 2)
    with pytest.raises(CorruptError, match=r"nested too deeply|seal of line"):
        read(tmp_path / "run")


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("stream", {"name": 7, "keys": [1], "values": [1]}, "has no name or no layout"),
        ("stream", {"name": "fc", "keys": ["a"], "values": [1]}, "not made of whole numbers"),
        ("stream", {"name": "fc", "values": [1]}, "KeyError"),
        ("terms", {"fc.weight": {"form": None, "at": [0, 0]}}, "cannot be made of 'fc' by"),
        ("terms", {"fc.weight": {"form": "outer", "at": [0]}}, "cannot be made of 'fc' by"),
        ("terms", {"fc.weight": {"form": "outer", "at": [0, 0], "groups": 0}}, "cannot be made"),
        ("terms", ["fc.weight"], "AttributeError"),
    ],
)
def test_a_senseless_declaration_is_named(
    part: str, value: Any, problem: str, tmp_path: Path
) -> None:
    """A log whose seals fit may still come from a stranger."""
    log = record(tmp_path / "run", 1, 1)
    start, rows = (json.loads(line) for line in log.read_text().splitlines()[:2])
    declared = {"stream": {"name": "fc", "keys": [1], "values": [1]}, "terms": {}, part: value}
    rows = {name: v for name, v in rows.items() if name != "line_crc32"} | {"streams": [declared]}
    log.write_text(
        seal_line({k: v for k, v in start.items() if k != "line_crc32"}) + seal_line(rows)
    )
    (tmp_path / "run" / "end.json").unlink()
    with pytest.raises(CorruptError, match=f"is senseless: .*{problem}"):
        Ledger(tmp_path / "run")


def test_a_run_of_format_2_is_read(tmp_path: Path) -> None:
    """Recorded and resumed by the version that wrote it; its logs have no chain and no end."""
    run = dualform.open(FORMAT_2)
    assert (run.steps, run.ids, run.check()) == (5, ["ant", "bee"], [])
    assert not Ledger(FORMAT_2).unfinished  # nobody can say
    assert run.audit().remainder < 1e-6


@pytest.mark.parametrize("which", [0, 1])
def test_damage_to_a_run_of_format_2_is_named(which: int, tmp_path: Path) -> None:
    """As far as its lines tell: altered ones, and the start."""
    lines = logs(FORMAT_2)[which].read_bytes().splitlines(keepends=True)
    altered = [flip(line, 9) for line in lines]
    broken = [[*lines[:k], altered[k], *lines[k + 1 :]] for k in range(len(lines))]
    for number, left in enumerate([*broken, lines[1:]]):
        path = shutil.copytree(FORMAT_2, tmp_path / f"copy-{number}")
        logs(path)[which].write_bytes(b"".join(left))
        with pytest.raises(CorruptError, match=r"commits\.jsonl"):
            Ledger(path)


def test_who_goes_on_with_a_run_of_format_2_chains_its_logs(tmp_path: Path) -> None:
    path = shutil.copytree(FORMAT_2, tmp_path / "run")
    LedgerWriter.resume(path, 5).close()
    assert list(Ledger(path).check()) == []
    log = logs(path)[1]
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(CorruptError, match=r"has 3 lines where .* counted 4"):
        Ledger(path)
