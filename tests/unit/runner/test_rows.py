import weakref
from typing import Any

import msgspec
import numpy as np
import torch

from toka_async.arrays import column, f32_column, i32_column
from toka_async.messages import Prompt, Ready, Step, TokenSampling
from toka_async.runner.rows import RowTables, read_prompt


def _rows(max_seqs: int) -> RowTables:
    ready = Ready(num_pages=10_000, page_size=4, max_seqs=max_seqs, max_context=1000, vocab_size=50)
    return RowTables(ready, torch.device("cpu"))


def _prompt(key: int, num_tokens: int, pages: list[int]) -> Prompt:
    ids = i32_column(range(num_tokens))
    return Prompt(
        key=key, token_ids=ids, num_prompt=num_tokens, pages=i32_column(pages), sampling=TokenSampling(top_p=0.5)
    )


def _admission(slots: list[int], keys: list[int], starts: list[int]) -> dict[str, Any]:
    return {
        "admit_slots": i32_column(slots),
        "admit_keys": i32_column(keys),
        "admit_starts": i32_column(starts),
        "admit_seeds": column(np.array([100 + slot for slot in slots], dtype=np.int64)),
    }


def test_thousands_of_forks_at_once() -> None:
    rows = _rows(5000)
    shared = [9, 8, 7]
    rows.apply(
        Step(
            step_id=0,
            prompts=(_prompt(3, 14, shared),),
            **_admission([*range(5000)], [3] * 5000, [13] * 5000),
            page_slots=i32_column(range(5000)),
            page_ids=i32_column(range(1000, 6000)),
            joined=i32_column(range(5000)),
        )
    )
    assert rows.on_device.page_table[:-1, :3].tolist() == [shared] * 5000
    assert rows.on_device.page_table[:-1, 3].tolist() == [*range(1000, 6000)]
    assert set(rows.num_pages.tolist()) == {4}
    assert set(rows.on_device.last_tokens[:-1].tolist()) == {13}
    assert rows.seeds.tolist() == [*range(100, 5100)]
    assert rows.order.tolist() == [*range(5000)]
    assert len({id(prompt) for prompt in rows.prompts}) == 1


def test_the_page_table_is_as_wide_as_its_longest_row() -> None:
    rows = _rows(3)
    rows.apply(Step(step_id=0, prompts=(_prompt(1, 9, [1, 2]),), **_admission([2], [1], [0])))
    width = rows.on_device.page_table.shape[1]
    rows.apply(Step(step_id=1, page_slots=i32_column([2] * 98), page_ids=i32_column(range(3, 101))))
    assert width < 16 < rows.on_device.page_table.shape[1] <= 128
    assert rows.on_device.page_table[2, :100].tolist() == [*range(1, 101)]
    assert rows.on_device.page_table[:2].count_nonzero() == 0


def test_a_freed_slot_can_be_taken_in_the_same_step() -> None:
    rows = _rows(3)
    first = {"prompts": (_prompt(1, 9, [1, 2]),), **_admission([0, 1], [1, 1], [8, 8])}
    rows.apply(Step(step_id=0, **first, joined=i32_column([0, 1])))
    second = {"prompts": (_prompt(2, 5, [6]),), **_admission([0], [2], [3])}
    rows.apply(
        Step(step_id=1, freed=i32_column([0]), dropped_prompts=i32_column([1]), **second, joined=i32_column([0]))
    )
    assert rows.order.tolist() == [1, 0]
    assert rows.on_device.page_table[0, 0] == 6
    assert (rows.num_pages[0], rows.positions[0], rows.num_prompt[0], int(rows.on_device.last_tokens[0])) == (
        1,
        3,
        5,
        3,
    )


def test_a_prompt_lives_as_long_as_a_row_or_its_key() -> None:
    rows = _rows(2)
    rows.apply(Step(step_id=0, prompts=(_prompt(1, 9, [1]),), **_admission([0, 1], [1, 1], [0, 0])))
    alive = weakref.ref(rows.prompts[0].token_ids)
    rows.apply(Step(step_id=1, dropped_prompts=i32_column([1]), freed=i32_column([0])))
    assert alive() is not None
    rows.apply(Step(step_id=2, freed=i32_column([1])))
    assert alive() is None


def test_a_prompt_has_the_distinct_ids_of_the_vocabulary_and_sums_of_biases() -> None:
    sampling = TokenSampling(
        end_ids=i32_column([7, 2, 7, 50, -1]),
        bias_ids=i32_column([9, 3, 9, 50]),
        bias_values=f32_column([1.0, 2.0, 0.5, 4.0]),
        allowed_ids=i32_column([8, 8, 1, 99]),
    )
    prompt = read_prompt(msgspec.structs.replace(_prompt(1, 3, []), sampling=sampling), 50)
    assert (prompt.end_ids.tolist(), prompt.allowed_ids.tolist()) == ([2, 7], [1, 8])
    assert (prompt.bias_ids.tolist(), prompt.bias.tolist()) == ([3, 9], [2.0, 1.5])
    kinds = [np.int32, np.int32, np.float32, np.int32]
    assert [each.dtype for each in (prompt.end_ids, prompt.bias_ids, prompt.bias, prompt.allowed_ids)] == kinds


def test_a_prompt_without_lists_keeps_nothing_of_its_message() -> None:
    encoded = msgspec.msgpack.encode(_prompt(1, 3, []))
    prompt = read_prompt(msgspec.msgpack.decode(encoded, type=Prompt), 50)
    arrays = (prompt.token_ids, prompt.pages, prompt.end_ids, prompt.bias_ids, prompt.bias, prompt.allowed_ids)
    assert all(each.base is None for each in arrays)
    assert [each.size for each in arrays] == [3, 0, 0, 0, 0, 0]
