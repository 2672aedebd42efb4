from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import VOCAB, SmallCore, got, wanted
from toka_async.arrays import EMPTY, i32_column
from toka_async.messages import Ready, Submit, TokenSampling
from toka_async.scheduler.core import Core

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_importing_the_core_loads_no_torch_sockets_or_web_server() -> None:
    code = (
        "import sys, toka_async.scheduler.core\n"
        "print([name for name in ('torch', 'zmq', 'aiohttp', 'uvloop', 'asyncio') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ---- requests that end by themselves


@pytest.mark.parametrize("fields", [{}, {"sampling": TokenSampling(num_prompt_logprobs=1)}])
def test_a_prompt_of_a_token_and_no_tokens_wanted_needs_no_step(fields: dict[str, object]) -> None:
    core = SmallCore()
    received = core.submit(submit(0, [3], max_tokens=0, **fields))
    assert received.ended
    assert received.prefilled is not None
    assert core.core.num_requests == 0
    assert not core.turn()


def test_requests_of_other_kinds_do_not_change_a_requests_tokens() -> None:
    core = SmallCore(num_pages=40, steps_ahead=3)
    received = [
        core.submit(submit(0, PROMPT, max_tokens=9, stream=True, sampling=TokenSampling(num_logprobs=3))),
        core.submit(submit(1, PROMPT, n=20, max_tokens=3)),
        core.submit(submit(2, PROMPT[:5], max_tokens=0, sampling=TokenSampling(num_prompt_logprobs=2))),
        core.submit(submit(3, [1], n=2, max_tokens=30, sampling=TokenSampling(end_ids=i32_column([5])))),
    ]
    core.drain()
    for entry in received:
        assert got(entry) == wanted(entry)


# ---- requests that cannot run


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 4090}, "prompt and max_tokens are 4100 tokens, the context has 4096"),
        ({"max_tokens": 247}, "the KV cache holds 256; raise cache.num_tokens or lower max_tokens"),
        ({"max_tokens": 243, "n": 2}, "the KV cache holds 256; raise cache.num_tokens or lower max_tokens"),
        ({"n": 0}, "n of 1 or more"),
        ({"max_tokens": -1}, "max_tokens of 0 or more"),
        ({"prompt": EMPTY}, "a prompt token"),
    ],
)
def test_a_request_that_can_never_run_fails_at_once(fields: dict[str, object], message: str) -> None:
    core = SmallCore()
    received = core.submit(raw_submit(fields))
    assert received.failed is not None
    assert message in received.failed
    assert core.core.num_requests == 0
    assert not core.turn()


def raw_submit(fields: dict[str, object]) -> Submit:
    values: dict[str, object] = {"request_id": 0, "prompt": i32_column(PROMPT), "max_tokens": 4, "seed": 0}
    return Submit(**values | {"sampling": TokenSampling()} | fields)  # type: ignore[arg-type]


def test_a_request_that_fills_the_cache_runs() -> None:
    core = SmallCore(num_pages=16)
    one = core.submit(submit(0, PROMPT, max_tokens=54))
    many = core.submit(submit(1, PROMPT, max_tokens=50, n=2))
    core.drain()
    assert got(one) == wanted(one)
    assert got(many) == wanted(many)


def test_an_id_in_use_fails() -> None:
    core = SmallCore()
    core.submit(submit(0, PROMPT))
    core.core.submit(submit(0, PROMPT), 0.0)
    core.collect()
    assert core.received[0].failed == "request id 0 is in use"


# ---- cancels


@pytest.mark.parametrize("turns", range(7))
@pytest.mark.parametrize("fields", [{}, {"n": 20}, {"n": 4, "max_tokens": 1}, {"priority": -1, "stream": True}])
def test_a_cancel_at_any_time_gives_everything_back(turns: int, fields: dict[str, object]) -> None:
    core = SmallCore(max_tokens=9, steps_ahead=3, num_pages=20)
    other = core.submit(submit(0, PROMPT, max_tokens=12))
    core.submit(submit(1, [*PROMPT, *PROMPT], **{"max_tokens": 30} | fields))
    for _ in range(turns):
        core.turn()
    core.build()
    core.cancel(1)
    core.core.check()
    core.drain()
    assert core.core.num_requests == 0
    assert (core.stats.pages_used, core.stats.num_running, core.stats.num_waiting) == (0, 0, 0)
    assert got(other) == wanted(other)


def test_cancelling_everything_leaves_no_page_in_use() -> None:
    core = SmallCore(num_pages=30, steps_ahead=3)
    for i in range(30):
        core.submit(submit(i, [i % 5, *PROMPT], n=1 + i % 4, max_tokens=15))
    for _ in range(6):
        core.turn()
    assert core.core.num_in_flight > 0
    for i in range(30):
        core.cancel(i)
    core.core.check()
    core.drain()
    assert (core.stats.pages_used, core.stats.num_running, core.stats.num_waiting) == (0, 0, 0)
    again = core.submit(submit(99, PROMPT, n=8, max_tokens=3))
    core.drain()
    assert got(again) == wanted(again)


def test_a_cancelled_id_can_be_used_again_while_its_steps_are_on_their_way() -> None:
    core = SmallCore(steps_ahead=4)
    core.submit(submit(0, PROMPT, max_tokens=30))
    core.build()
    core.core.cancel(0)
    again = core.submit(submit(0, PROMPT[::-1], max_tokens=5))
    core.drain()
    assert got(again) == wanted(again)


def test_a_cancel_of_what_has_ended_is_nothing() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT))
    core.drain()
    core.core.cancel(0)
    core.core.cancel(12345)
    core.collect()
    assert received.ended
    core.core.check()


def test_many_cancels_among_many_requests() -> None:
    ready = Ready(num_pages=100_000, page_size=16, max_seqs=512, max_context=4096, vocab_size=VOCAB)
    core = Core(ready, max_tokens=8192, steps_ahead=1)
    for i in range(8192):
        core.submit(submit(i, [i % VOCAB] * 20, max_tokens=100), 0.0)
    steps = list(core.next_steps(0.0))
    assert len(steps) == 1
    order = np.random.default_rng(0).permutation(8192)[:2000].tolist()
    for request_id in order:
        core.cancel(request_id)
    assert core.num_requests == 6192
    core.check()


# ---- the steps, and what is told of them


def test_steps_are_queued_up_to_the_depth_and_no_further() -> None:
    core = SmallCore(steps_ahead=3)
    core.submit(submit(0, PROMPT, max_tokens=20))
    core.build()
    assert len(core.queued) == core.core.num_in_flight == 3
    core.build()
    assert len(core.queued) == 3
    core.complete()
    core.build()
    assert len(core.queued) == 3


def test_a_step_is_built_when_the_one_before_is_taken() -> None:
    """So idle ranks have the first while the second is built."""
    core = SmallCore(steps_ahead=3).core
    core.submit(submit(0, PROMPT, max_tokens=20), 0.0)
    taken = [core.num_in_flight for _ in core.next_steps(0.0)]
    assert taken[0] == 1
    assert taken[-1] == 3


def test_nothing_to_do_is_no_step() -> None:
    core = SmallCore()
    assert list(core.core.next_steps(0.0)) == []
    core.submit(submit(0, PROMPT))
    core.drain()
    assert list(core.core.next_steps(0.0)) == []
    assert core.core.take_messages() == []
