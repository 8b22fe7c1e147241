"""Sessions: who recorded when, and which of their lines still count.

Each time recording starts, rank 0 opens a session, and every other rank joins it with a writer of
its own. A session that starts after step S voids what earlier sessions say of later steps, in all
ranks. A step counts when every rank of its session has committed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualform.errors import CorruptError
from dualform.ledger.codecs import Codec
from dualform.ledger.format import LOG_FILE, Declaration
from dualform.ledger.index_checks import check_index
from dualform.ledger.log import Damage, Log, Logs, Record, session_and_rank
from dualform.ledger.tensors import TensorFile


@dataclass(frozen=True)
class Commit:
    """A committed file: its log record, and the file opened."""

    path: Path
    record: Record

    @property
    def step(self) -> int:
        """The last step the file speaks of."""
        return int(self.record["last" if self.record["kind"] == "rows" else "step"])

    @property
    def file(self) -> TensorFile:
        """The arrays, after a look at the length and the header; it is opened once."""
        opened: TensorFile | None = vars(self).get("opened")
        if opened is None:  # by `cached_property`, threads would open one after the other
            opened = vars(self)["opened"] = self._open()
        return opened

    def _open(self) -> TensorFile:
        return TensorFile(self.path, self.record.get("index_crc32"), self.record["bytes"])

    def __getstate__(self) -> dict[str, Any]:
        """Where it is sent elsewhere: without the opened file, and found from any folder."""
        state = {name: value for name, value in vars(self).items() if name != "opened"}
        return {**state, "path": self.path.absolute()}


@dataclass(frozen=True)
class Shard(Commit):
    """A committed file of rows: the steps `first` to `last` of one rank.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> shard = run.source.ledger.shards[0]
    >>> shard.rank, shard.first, shard.last, shard.codec("0").name
    (0, 1, 6, 'exact')
    """

    rank: int
    declared: tuple[Declaration, ...]
    """The streams that its line in the log declares."""
    codecs: Mapping[str, Codec]
    """How the rows of each stream are kept, by the stream's name."""
    log: Sequence[Shard] = field(default=(), repr=False, compare=False)
    """All shards of its log, in order."""

    def _open(self) -> TensorFile:
        """The same, after a look at the index, too."""
        file = super()._open()
        check_index(file, self.first, self.last)
        return file

    @property
    def first(self) -> int:
        """The first step it has rows of."""
        return int(self.record["first"])

    @property
    def last(self) -> int:
        """The last step it has rows of."""
        return self.step

    def codec(self, stream: str) -> Codec:
        """How the rows of a stream are kept here."""
        if stream not in self.codecs:
            raise CorruptError(f"the log of '{self.path}' does not declare the stream '{stream}'.")
        return self.codecs[stream]

    def keys_of(self, stream: str) -> str:
        """The stream whose keys a stream has here: itself, unless the log's line names another."""
        return str(self.record.get("same_keys", {}).get(stream, stream))

    def array(self, stream: str, name: str) -> str:
        """What an array of a stream is called here."""
        is_key = name in self.codec(stream).key_arrays
        return f"{self.keys_of(stream) if is_key else stream}/{name}"

    @property
    def repeating(self) -> set[str]:
        """The streams whose keys here are among all that its log has."""
        ends = [name.rpartition("/") for name in self.file.arrays]
        return {stream for stream, _, array in ends if array == "places"}

    def in_one_table(self, stream: str) -> list[Shard]:
        """The shards of its log up to itself whose keys of a stream are of one kind."""
        found: list[Shard] = []
        for shard in self.log:
            if any(one.stream.name == stream for one in shard.declared):
                found = []
            found.append(shard)
            if shard.path == self.path:
                break
        return found


@dataclass
class Session:
    """One time that recording went on: from a step, by so many ranks."""

    number: int
    step: int
    """The step after which it began."""
    of: int
    """How many ranks take part."""
    start: Record
    """What rank 0 noted when it began."""
    commits: dict[int, list[Commit]] = field(default_factory=dict)
    """What each rank that has joined committed."""

    @property
    def complete(self) -> bool:
        """Whether every rank has joined."""
        return len(self.commits) == self.of

    @property
    def reached(self) -> int:
        """The last step that every rank has committed."""
        if not self.complete:
            return self.step
        return min(self.reached_by(rank) for rank in self.commits)

    def reached_by(self, rank: int) -> int:
        """The last step up to which the shards of a rank follow each other without a gap."""
        reached = self.step
        for shard in self.shards(rank):
            if shard.first != reached + 1:
                break
            reached = shard.last
        return reached

    def shards(self, rank: int) -> list[Shard]:
        """What a rank committed of rows."""
        return [commit for commit in self.commits[rank] if isinstance(commit, Shard)]

    def ends_at(self, step: int) -> bool:
        """Whether every rank's shards end at this step: then recording can go on from there."""
        if step == self.step:
            return True
        ranks = self.commits
        return step <= self.reached and all(
            any(shard.last == step for shard in self.shards(rank)) for rank in ranks
        )

    def void_after(self, step: int) -> None:
        """Drops what lies beyond the step from which a later session went on."""
        for rank, commits in self.commits.items():
            self.commits[rank] = [commit for commit in commits if commit.step <= step]

    def missing(self, path: Path, until: int | None) -> Iterator[Damage]:
        """The gaps in what the ranks committed; `until` is where a later session began."""
        of_rank = {rank: f" of rank {rank}" if self.of > 1 else "" for rank in self.commits}
        for rank in self.commits:
            reached = self.reached_by(rank)
            for shard in [shard for shard in self.shards(rank) if shard.first > reached][:1]:
                lost = f"steps {reached + 1} to {shard.first - 1}{of_rank[rank]} are missing"
                yield shard.path, f"{lost}: what follows them in '{shard.path}' is not used."
                break
            else:
                if until is not None and reached < until:
                    lost = f"steps {reached + 1} to {until}{of_rank[rank]} are missing"
                    yield path, f"{lost}: what was recorded after them in '{path}' is not used."
        if until is not None and until > self.step and not self.complete:
            joined = f"{len(self.commits)} of {self.of} ranks"
            yield path, f"session {self.number} of '{path}' went on, and only {joined} left a log."


def read_sessions(path: Path, logs: Logs) -> tuple[list[Session], list[Damage]]:
    """What counts: each session voids what earlier ones say of later steps."""
    sessions: list[Session] = []
    damage: list[Damage] = []
    for log in logs.logs:
        if log.start is None:
            continue
        try:
            session, rank = _session(log.start)
            named = session_and_rank(log.folder) == (session.number, rank)
            newer = not sessions or sessions[-1].number < session.number
            if named and rank == 0 and newer:
                sessions = [earlier for earlier in sessions if earlier.step <= session.step]
                for earlier in sessions:
                    earlier.void_after(session.step)
                sessions.append(session)
            if problem := _misplaced(log, sessions, session, rank):
                damage.append((log.path, f"'{log.path}' {problem}."))
            else:
                sessions[-1].commits[rank] = list(_commits(log, rank))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"'{log.path}' has a senseless record: {error!r}.") from error
    if not sessions or "initial" not in sessions[0].start:
        lost = "".join(f" {problem}" for _, problem in logs.damage[:1])
        raise CorruptError(
            f"'{path}' has no log that says how it began; restore it from a copy.{lost}"
        )
    return sessions, damage


def _misplaced(log: Log, sessions: Sequence[Session], own: Session, rank: int) -> str:
    """Why a log does not belong to the last session, or nothing."""
    if session_and_rank(log.folder) != (own.number, rank):
        return f"is of session {own.number} and rank {rank}; its folder has another name"
    if not sessions or sessions[-1].number != own.number:
        return f"is of session {own.number}, which rank 0 did not begin"
    last = sessions[-1]
    if rank in last.commits:
        return f"is the second log of rank {rank} in session {own.number}"
    if (own.step, own.of) != (last.step, last.of):
        given = f"rank {rank} of {own.of} after step {own.step}"
        return f"is by {given}; rank 0 began with {last.of} ranks after step {last.step}"
    return ""


def _session(start: Record) -> tuple[Session, int]:
    """What a start says: its session, and the rank."""
    _check_numbers(start, ("session", "rank", "of", "step"))
    if start["rank"] >= start["of"]:
        raise ValueError(f"rank {start['rank']} of {start['of']} cannot be")
    if "initial" in start:
        _check_numbers(start["initial"], ("bytes", "crc32"))
        if start["step"]:
            raise ValueError(f"a run begins after step 0, not {start['step']}")
    if not isinstance(start.get("buffers", []), list):
        raise ValueError("'buffers' is not a list")
    return Session(start["session"], start["step"], start["of"], start), start["rank"]


def _commits(log: Log, rank: int) -> Iterator[Commit]:
    """The files that a log names, after a look at the fields that everything relies on."""
    codecs: dict[str, Codec] = {}
    shards: list[Shard] = []
    for record in log.commits:
        kinds: dict[str, tuple[str, ...]] = {"rows": ("first", "last"), "weights": ("step",)}
        _check_numbers(record, ("bytes", "crc32", *kinds[record["kind"]]))
        name = record["file"]
        if name != Path(name).name or name in ("", ".", ".."):
            raise CorruptError(f"'{log.folder / LOG_FILE}' names a file outside the run: {name!r}.")
        if record["kind"] == "weights":
            record["mark"]
            yield Commit(log.folder / name, record)
            continue
        for note in record["notes"]:
            _check_numbers(note, ("step",))
            note["book"], note["reason"]
        if not record["first"] <= record["last"] < record["first"] + record["bytes"]:
            steps = f"{record['first']} to {record['last']}"
            raise ValueError(f"a file of {record['bytes']} bytes has the steps {steps}")
        declared = tuple(map(Declaration.from_json, record["streams"]))
        if declared:
            codecs = codecs | {d.stream.name: d.codec for d in declared}
        same_keys = record.get("same_keys", {})
        if not all(isinstance(one, str) for pair in same_keys.items() for one in pair):
            raise ValueError(f"'same_keys' is {same_keys!r}, not names of streams")
        shards.append(Shard(log.folder / name, record, rank, declared, codecs, shards))
        yield shards[-1]


def _check_numbers(record: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if type(record[name]) is not int or record[name] < 0:
            raise ValueError(f"'{name}' is {record[name]!r}, not a number from 0")
