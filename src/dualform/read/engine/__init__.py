"""Who reads shards, and how partial results become one; README.md says why."""

from dualform.read.engine.cluster import Ray
from dualform.read.engine.devices import device_named
from dualform.read.engine.interface import BlockFold, BlockSum, Engine, Fold, Part, Scratch
from dualform.read.engine.names import engine, engine_of
from dualform.read.engine.read_ahead import ReadAhead
from dualform.read.engine.reader import RowReader
from dualform.read.engine.serial import Serial
from dualform.read.engine.shards import ShardRange
from dualform.read.engine.threads import Threads

__all__ = [
    "BlockFold",
    "BlockSum",
    "Engine",
    "Fold",
    "Part",
    "Ray",
    "ReadAhead",
    "RowReader",
    "Scratch",
    "Serial",
    "ShardRange",
    "Threads",
    "device_named",
    "engine",
    "engine_of",
]
