from __future__ import annotations

import numpy as np

from tests.cases.columns import ids
from toka_async.arrays import Int32
from toka_async.scheduler.sequences.sequence_table import NUM_ENDS, SequenceTable, index


def end(table: SequenceTable, done: Int32, last_step: int, completed: int) -> None:
    """End sequences; `last_step` computes them."""
    table.last_step[done] = last_step
    table.alive[done] = table.holds[done] = False
    table.retire(done, completed)


def test_a_row_is_not_used_again_before_its_last_step_is_complete() -> None:
    table = SequenceTable(2)
    first = table.take(2)
    end(table, first, last_step=5, completed=3)
    table.check()
    assert table.num_free == 0
    table.complete(4)
    assert table.num_free == 0
    table.complete(5)
    assert table.num_free == 2
    assert sorted(table.take(2).tolist()) == [0, 1]


def test_a_row_that_no_queued_step_computes_is_free_at_once() -> None:
    table = SequenceTable(3)
    done = table.take(3)
    table.last_step[done] = [2, 3, 4]
    table.alive[done] = table.holds[done] = False
    table.retire(done, 3)
    assert table.num_free == 2
    table.complete(4)
    assert table.num_free == 3
    table.check()


def test_tables_grow_and_keep_their_values() -> None:
    table = SequenceTable(2)
    old = table.take(2)
    table.position[old], table.ends[old, 0] = [5, 6], [7, 8]
    new = table.take(3)
    assert table.capacity == 8
    assert not set(old.tolist()) & set(new.tolist())
    assert table.position[old].tolist() == [5, 6]
    assert (table.ends[new] == -1).all()
    assert table.holds[new].all()
    assert (table.head[new] == -1).all()
    table.check()


def test_end_tokens_are_the_sequences_own() -> None:
    table = SequenceTable(4)
    few, many, none = table.take(1), table.take(2), table.take(1)
    table.set_ends(few, ids(3))
    table.set_ends(many, np.arange(10, 10 + NUM_ENDS + 2, dtype=np.int32))
    rows = np.concatenate([few, many, none])
    assert table.find_ended(rows, ids(3, 3, 10, 3)).tolist() == [True, False, True, False]
    last = 10 + NUM_ENDS + 1
    assert table.find_ended(rows, ids(last, last, last - 1, last)).tolist() == [False, True, True, False]


def test_a_row_forgets_the_end_tokens_of_its_last_use() -> None:
    table = SequenceTable(1)
    seq = table.take(1)
    table.set_ends(seq, np.arange(NUM_ENDS + 1, dtype=np.int32))
    end(table, seq, last_step=0, completed=0)
    again = table.take(1)
    assert again.tolist() == seq.tolist()
    for token in range(NUM_ENDS + 1):
        assert not table.find_ended(again, ids(token)).any()


def test_sets_of_many_end_tokens() -> None:
    """Sequences come and go, some with the same set; unused sets are forgotten."""
    random = np.random.default_rng(1)
    table = SequenceTable(8)
    sets: dict[int, set[int]] = {}
    for step in range(200):
        for seq in [seq for seq in sets if random.random() < 0.3]:
            end(table, ids(seq), last_step=step, completed=step)
            del sets[seq]
        while len(sets) < 8:
            new = table.take(1)
            number = random.integers(0, 40 + step)
            of_seq = np.random.default_rng(number).permutation(300)[: 2 * NUM_ENDS].astype(np.int32)
            table.set_ends(new, of_seq)
            sets[int(new[0])] = set(of_seq.tolist())
        rows = random.permutation(np.array(list(sets), np.int32))
        tokens = [random.choice([*sets[seq], *range(300)]) for seq in rows.tolist()]
        expected = [token in sets[seq] for seq, token in zip(rows.tolist(), tokens, strict=True)]
        assert table.find_ended(rows, np.array(tokens, np.int32)).tolist() == expected
    assert len(table._end_sets) <= 2 * 9 + 1
    assert table._end_keys.size == len(table._end_sets) * NUM_ENDS


def test_the_youngest_is_last_by_priority_then_arrival_then_sample() -> None:
    table = SequenceTable(4)
    assert table.find_youngest() == -1
    taken = table.take(4)
    a, b, c, d = taken.tolist()
    table.priority[taken], table.arrival[taken], table.sample[taken] = [0, 0, 0, -7], [1, 2, 2, 9], [0, 3, 4, 9]
    assert table.find_youngest() == c
    table.holds[c] = False
    assert table.find_youngest() == b
    table.holds[b] = False
    assert table.find_youngest() == a
    table.holds[a] = False
    assert table.find_youngest() == d
    assert table.order(d) == (-7, 9, 9)


def test_the_living_sequences_of_a_request() -> None:
    table = SequenceTable(4)
    taken = table.take(3)
    table.request[taken] = [0, 7, 7]
    table.alive[taken[2]] = False
    assert table.find_living(7).tolist() == [taken[1]]
    assert table.find_living(0).tolist() == [taken[0]]


def test_an_index_writes_to_the_same_rows() -> None:
    for table in (ids(2), ids(3, 1), ids()):
        values = np.zeros(4, np.int32)
        values[index(table)] = 1
        assert np.flatnonzero(values).tolist() == sorted(table.tolist())
