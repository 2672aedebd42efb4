from __future__ import annotations

import numpy as np

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted
from toka_async.messages import Ready
from toka_async.scheduler.admission.policy import UntilFull
from toka_async.scheduler.sequences.requests import PrefillTask, Request
from toka_async.scheduler.sequences.running import RunningSet


def test_pages_are_the_only_limit() -> None:
    policy = UntilFull(RunningSet(Ready(num_pages=4, page_size=4, max_seqs=1, max_context=9, vocab_size=9), True))
    prompt = np.asarray([1], np.int32)
    assert policy.prompt_fits(PrefillTask(Request(submit(0, [1]), prompt, 0, 1), 0, prompt), 10**6)


def test_it_takes_all_pages_where_looking_ahead_takes_what_lasts() -> None:
    preemptions = []
    for until_full in (True, False):
        core = SmallCore(num_pages=20, until_full=until_full)
        received = [core.submit(submit(i, [i] * 6, max_tokens=20)) for i in range(12)]
        core.drain()
        assert all(got(entry) == wanted(entry) for entry in received)
        preemptions.append(core.stats.num_preemptions)
    assert preemptions[0] > 0
    assert preemptions[1] == 0
