"""The tables of running sequences."""

from __future__ import annotations

import numpy as np

from toka_async.arrays import Int32
from toka_async.scheduler.sequences.sequence_table import NUM_ENDS, SequenceTable, index


def ids(*values: int) -> Int32:
    return np.asarray(values, dtype=np.int32)


def end(lanes: SequenceTable, done: Int32, last_step: int, completed: int) -> None:
    """The lanes end; `last_step` computes them."""
    lanes.last_step[done] = last_step
    lanes.alive[done] = lanes.holds[done] = False
    lanes.retire(done, completed)


def test_a_lane_is_not_used_again_before_its_last_step_is_complete() -> None:
    lanes = SequenceTable(2)
    first = lanes.take(2)
    end(lanes, first, last_step=5, completed=3)
    lanes.check()
    assert lanes.num_free == 0
    lanes.complete(4)
    assert lanes.num_free == 0
    lanes.complete(5)
    assert lanes.num_free == 2
    assert sorted(lanes.take(2).tolist()) == [0, 1]


def test_a_lane_that_no_queued_step_computes_is_free_at_once() -> None:
    lanes = SequenceTable(3)
    done = lanes.take(3)
    lanes.last_step[done] = [2, 3, 4]
    lanes.alive[done] = lanes.holds[done] = False
    lanes.retire(done, 3)
    assert lanes.num_free == 2
    lanes.complete(4)
    assert lanes.num_free == 3
    lanes.check()


def test_tables_grow_and_keep_their_values() -> None:
    lanes = SequenceTable(2)
    old = lanes.take(2)
    lanes.position[old], lanes.ends[old, 0] = [5, 6], [7, 8]
    new = lanes.take(3)
    assert lanes.capacity == 8
    assert not set(old.tolist()) & set(new.tolist())
    assert lanes.position[old].tolist() == [5, 6]
    assert (lanes.ends[new] == -1).all()
    assert lanes.holds[new].all()
    assert (lanes.head[new] == -1).all()
    lanes.check()


def test_end_tokens_are_the_lanes_own() -> None:
    lanes = SequenceTable(4)
    few, many, none = lanes.take(1), lanes.take(2), lanes.take(1)
    lanes.set_ends(few, ids(3))
    lanes.set_ends(many, np.arange(10, 10 + NUM_ENDS + 2, dtype=np.int32))
    rows = np.concatenate([few, many, none])
    assert lanes.ended(rows, ids(3, 3, 10, 3)).tolist() == [True, False, True, False]
    last = 10 + NUM_ENDS + 1
    assert lanes.ended(rows, ids(last, last, last - 1, last)).tolist() == [False, True, True, False]


def test_a_lane_forgets_the_end_tokens_of_its_last_use() -> None:
    lanes = SequenceTable(1)
    lane = lanes.take(1)
    lanes.set_ends(lane, np.arange(NUM_ENDS + 1, dtype=np.int32))
    end(lanes, lane, last_step=0, completed=0)
    again = lanes.take(1)
    assert again.tolist() == lane.tolist()
    for token in range(NUM_ENDS + 1):
        assert not lanes.ended(again, ids(token)).any()


def test_sets_of_many_end_tokens() -> None:
    """Lanes come and go, each with a set of its own or another's; sets of none are forgotten."""
    random = np.random.default_rng(1)
    lanes = SequenceTable(8)
    sets: dict[int, set[int]] = {}
    for step in range(200):
        for lane in [lane for lane in sets if random.random() < 0.3]:
            end(lanes, ids(lane), last_step=step, completed=step)
            del sets[lane]
        while len(sets) < 8:
            new = lanes.take(1)
            number = random.integers(0, 40 + step)
            of_lane = np.random.default_rng(number).permutation(300)[: 2 * NUM_ENDS].astype(np.int32)
            lanes.set_ends(new, of_lane)
            sets[int(new[0])] = set(of_lane.tolist())
        rows = random.permutation(np.array(list(sets), np.int32))
        tokens = [random.choice([*sets[lane], *range(300)]) for lane in rows.tolist()]
        expected = [token in sets[lane] for lane, token in zip(rows.tolist(), tokens, strict=True)]
        assert lanes.ended(rows, np.array(tokens, np.int32)).tolist() == expected
    assert len(lanes._end_sets) <= 2 * 9 + 1
    assert lanes._end_keys.size == len(lanes._end_sets) * NUM_ENDS


def test_the_youngest_is_last_by_priority_then_arrival_then_sample() -> None:
    lanes = SequenceTable(4)
    assert lanes.youngest() == -1
    taken = lanes.take(4)
    a, b, c, d = taken.tolist()
    lanes.priority[taken], lanes.arrival[taken], lanes.sample[taken] = [0, 0, 0, -7], [1, 2, 2, 9], [0, 3, 4, 9]
    assert lanes.youngest() == c
    lanes.holds[c] = False
    assert lanes.youngest() == b
    lanes.holds[b] = False
    assert lanes.youngest() == a
    lanes.holds[a] = False
    assert lanes.youngest() == d
    assert lanes.order(d) == (-7, 9, 9)


def test_the_living_lanes_of_a_request() -> None:
    lanes = SequenceTable(4)
    taken = lanes.take(3)
    lanes.request[taken] = [0, 7, 7]
    lanes.alive[taken[2]] = False
    assert lanes.of_request(7).tolist() == [taken[1]]
    assert lanes.of_request(0).tolist() == [taken[0]]


def test_an_index_writes_to_the_same_lanes() -> None:
    for lanes in (ids(2), ids(3, 1), ids()):
        values = np.zeros(4, np.int32)
        values[index(lanes)] = 1
        assert np.flatnonzero(values).tolist() == sorted(lanes.tolist())
