from __future__ import annotations

import aiohttp
import numpy as np
import pyarrow as pa
import pytest

from tests.drivers.web_server import web_server
from toka_async.client import RequestError, Result, Sample
from toka_async.ray.row_engine import (
    ERROR,
    OUTPUT,
    RowPlan,
    append_answers,
    is_chat,
    make_fields,
    make_seed,
    tokenize_chat,
)

PLAN = RowPlan("prompt", "id", 2, 0, {"max_tokens": 8, "temperature": 0.5})


def make_result(*lengths: int) -> Result:
    return Result([Sample(np.arange(size, dtype=np.int32), f"{size}", "length") for size in lengths], 0)


def test_parameters_of_a_row_come_before_those_of_the_job() -> None:
    assert make_fields({}, PLAN) == {"max_tokens": 8, "temperature": 0.5, "n": 2}
    own = {"max_tokens": 3, "top_p": 0.5, "stop": None, "n": 2}
    assert make_fields({"sampling_params": own}, PLAN) == {"max_tokens": 3, "temperature": 0.5, "top_p": 0.5, "n": 2}
    assert make_fields({"sampling_params": None}, PLAN)["max_tokens"] == 8
    with pytest.raises(RequestError, match="must be the job's, 2"):
        make_fields({"sampling_params": {"n": 3}}, PLAN)
    with pytest.raises(RequestError, match="expected a map"):
        make_fields({"sampling_params": "greedy"}, PLAN)


def test_seeds_are_a_rows_own_and_the_same_in_every_run() -> None:
    assert make_seed(0, 5) == make_seed(0, 5)
    assert len({make_seed(0, 5), make_seed(0, 6), make_seed(1, 5), make_seed(0, "a")}) == 4
    assert all(0 <= make_seed(0, row) < 2**63 for row in range(1000))


def test_a_sample_of_a_row_is_a_value_and_an_error_leaves_it_empty() -> None:
    batch = pa.table({"id": [1, 2], "generated_text": ["old", "old"]})
    made = append_answers(batch, [make_result(2), "wrong"], 1)
    assert made.to_pylist() == [
        {
            "id": 1,
            "generated_text": "2",
            "generated_tokens": [0, 1],
            "num_generated_tokens": 2,
            "finish_reason": "length",
            ERROR: "",
        },
        {"id": 2, **dict.fromkeys(OUTPUT), ERROR: "wrong"},
    ]


def test_several_samples_are_lists_and_types_are_the_same_in_every_batch() -> None:
    batch = pa.table({"id": [1]})
    good, bad = append_answers(batch, [make_result(2, 1)], 2), append_answers(batch, ["wrong"], 2)
    assert good.schema == bad.schema
    (row,) = good.to_pylist()
    assert (row["generated_text"], row["generated_tokens"]) == (["2", "1"], [[0, 1], [0]])
    assert bad.to_pylist()[0]["generated_tokens"] == []


async def test_chat_messages_become_tokens() -> None:
    assert is_chat([{"role": "user", "content": "hi"}])
    assert not any(map(is_chat, ("hi", [1, 2], [], None)))
    async with web_server() as world, aiohttp.ClientSession(world.url) as http:
        messages = [{"role": "user", "content": "hi", "name": None}]
        assert await tokenize_chat(http, messages)
        with pytest.raises(RequestError, match="role"):
            await tokenize_chat(http, [{"role": None, "content": "hi"}])
