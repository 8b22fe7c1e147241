"""Who reads shards, and how partial results become one; README.md says why."""

from dualform.read.engine.cluster import Ray
from dualform.read.engine.interface import BlockFold, Engine, Fold, Scratch
from dualform.read.engine.names import engine, engine_of
from dualform.read.engine.reader import RowReader
from dualform.read.engine.shards import ShardRange
from dualform.read.engine.threads import Serial, Threads

__all__ = [
    "BlockFold",
    "Engine",
    "Fold",
    "Ray",
    "RowReader",
    "Scratch",
    "Serial",
    "ShardRange",
    "Threads",
    "engine",
    "engine_of",
]
