"""Main memory that is used again: nobody's bytes are written over before they are given back."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from dualform.recording.transfer import ALIGNED, MOST_FREE, PIECE_BYTES, HostMemory


def test_rooms_are_apart_until_they_are_given_back() -> None:
    chance, memory = random.Random(0), HostMemory()
    held: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for _ in range(60):
        sizes = [chance.choice([0, 1, 63, 1000, PIECE_BYTES // 3]) for _ in range(5)]
        rooms = [memory.room(size) for size in sizes]
        assert [len(room) for room in rooms] == sizes
        assert all(room.data_ptr() % ALIGNED == 0 for room in rooms if len(room))
        held.append((rooms, memory.taken()))
        if len(held) > 3:
            memory.give_back(held.pop(chance.randrange(len(held)))[1])
        spans = sorted(
            (room.data_ptr(), room.data_ptr() + len(room))
            for rooms, _ in held
            for room in rooms
            if len(room)
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_large_array_has_a_piece_of_its_own_and_few_pieces_wait() -> None:
    memory = HostMemory()
    large = memory.room(PIECE_BYTES + 1)
    memory.give_back([*memory.taken(), *(torch.empty(1, dtype=torch.uint8),) * (2 * MOST_FREE)])
    assert memory.room(PIECE_BYTES + 1).data_ptr() == large.data_ptr()
    assert len(memory.taken()) == 1
    assert memory.copy(torch.arange(3)).tolist() == [0, 1, 2]
    assert not memory.taken()
