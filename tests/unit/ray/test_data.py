from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from toka_async.config import ConfigError, load_config
from toka_async.ray.data import BLOCK_SECONDS, TOKEN_RATE, find_max_seqs, generate, guess_block_rows

NO_DATASET: Any = None  # what is wrong is said before it is looked at


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="id_column"):
        generate(NO_DATASET, model="demo", output="out")
    with pytest.raises(ValueError, match="samples"):
        generate(NO_DATASET, model="demo", sampling={"n": 2})
    with pytest.raises(ValueError, match=r"sampling: .*max_token'"):
        generate(NO_DATASET, model="demo", sampling={"max_token": 2})
    with pytest.raises(ValueError, match=r"sampling: .*temperature"):
        generate(NO_DATASET, model="demo", sampling={"temperature": "hot"})
    with pytest.raises(ConfigError, match="nonsense"):
        generate(NO_DATASET, model="demo", nonsense=1)
    with pytest.raises(ConfigError, match="chosen for each replica"):
        generate(NO_DATASET, model="demo", zmq={"bind": "tcp://127.0.0.1:1"})


def test_a_column_that_is_not_there_is_named() -> None:
    columns: Any = SimpleNamespace(columns=lambda **_: ["id", "text"])
    with pytest.raises(ValueError, match="there is no column 'prompt'; there are id, text"):
        generate(columns, model="demo", device="simulated")
    with pytest.raises(ValueError, match="there is no column 'key'"):
        generate(columns, model="demo", device="simulated", prompt_column="text", id_column="key")


def test_a_block_is_about_two_minutes_of_work() -> None:
    rows = guess_block_rows(1000, 4, {"max_tokens": 500})
    assert rows * 4 * 500 == BLOCK_SECONDS * TOKEN_RATE * 1000
    assert guess_block_rows(1, 1000, {"max_tokens": 100_000}) == 1
    assert guess_block_rows(64, 1, {}) > guess_block_rows(64, 1, {"max_tokens": 64})


def test_the_samples_that_run_at_once_are_the_configurations() -> None:
    assert find_max_seqs(load_config(None, ["schedule.max_seqs=7"])) == 7
    assert find_max_seqs(load_config(None, ["model.device=cpu"])) == 256
    assert find_max_seqs(load_config(None, [])) == 8192
