from __future__ import annotations

import numpy as np

from toka_async.arrays import f32_column, i32_column
from toka_async.messages import Reason, Tokens
from toka_async.server.rows import join, split


def tokens(num_logprobs: int) -> Tokens:
    width = max(num_logprobs, 0)
    return Tokens(
        request_ids=i32_column([7, 8, 7]),
        samples=i32_column([0, 5, 1]),
        counts=i32_column([2, 0, 3]),
        reasons=i32_column([0, 2, 1]),
        token_ids=i32_column([10, 11, 12, 13, 14]),
        num_logprobs=num_logprobs,
        logprobs=f32_column([-float(i) for i in range(5)]) if num_logprobs >= 0 else memoryview(b""),
        top_ids=i32_column(range(5 * width)),
        top_logprobs=f32_column([float(i) for i in range(5 * width)]),
    )


def test_rows_are_cut_out() -> None:
    first, second, third = split(tokens(2))
    assert (first[:2], second[:2], third[:2]) == ((7, 0), (8, 5), (7, 1))
    assert [row[3] for row in (first, second, third)] == [Reason.NONE, Reason.LENGTH, Reason.STOP]
    assert [len(row[2]) for row in (first, second, third)] == [2, 0, 3]
    assert third[2].token_ids.tolist() == [12, 13, 14]
    assert third[2].logprobs.tolist() == [-2.0, -3.0, -4.0]
    assert third[2].top_ids.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert third[2].top_logprobs.dtype == np.float32


def test_rows_without_logprobs() -> None:
    for num_logprobs, num_chosen in ((-1, 0), (0, 3)):
        *_, (_, _, rows, _) = split(tokens(num_logprobs))
        assert rows.logprobs.shape == (num_chosen,)
        assert rows.top_ids.shape == (3, 0)


def test_join_and_part() -> None:
    (_, _, first, _), _, (_, _, third, _) = split(tokens(1))
    joined = join([first, third])
    assert joined.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert joined.top_ids.tolist() == [[0], [1], [2], [3], [4]]
    assert joined.part(1, 3).logprobs.tolist() == [-1.0, -2.0]
    assert join([third]) is third
    assert len(join([])) == 0
