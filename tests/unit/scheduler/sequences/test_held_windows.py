"""How prompts and sequences hold window pages; through whole cores: tests/unit/scheduler/test_core_windows.py."""

from __future__ import annotations

import numpy as np

from tests.drivers.page_rank import submit
from toka_async.arrays import Int32, as_i32
from toka_async.scheduler.cache.window_pool import WindowPool
from toka_async.scheduler.sequences.held_windows import HeldWindows
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.sequence_table import SequenceTable

SIZE, WINDOW = 4, 6


def make_run(length: int, n: int = 1) -> PromptRun:
    """A prompt in the first pages."""
    message = submit(0, [*range(length)], n=n)
    request = Request(message, as_i32(message.prompt), arrival=0, num_open=n)
    task = PrefillTask(request, 0 if n == 1 else -1, request.prompt)
    to_compute = length - (n > 1)
    pages = np.arange(to_compute // SIZE, dtype=np.int32)
    tail = 20 if to_compute % SIZE else -1
    return PromptRun(
        key=0, task=task, num_to_compute=to_compute, num_found=0, num_computed=0, nodes=[], pages=pages, tail_page=tail
    )


def make_windows(num_window_pages: int = 12) -> tuple[HeldWindows, SequenceTable]:
    table = SequenceTable(4)
    return HeldWindows(WindowPool(40, SIZE, num_window_pages, WINDOW), table), table


def used(windows: HeldWindows) -> list[int]:
    return np.flatnonzero(windows.pool._users).tolist()


def compute(windows: HeldWindows, run: PromptRun, count: int) -> None:
    run.num_computed += count
    windows.extend(run)


def test_a_prompt_holds_what_it_writes_and_what_its_next_token_sees() -> None:
    windows, _ = make_windows()
    run = make_run(22)
    windows.begin(run)
    compute(windows, run, 14)
    assert used(windows) == [0, 1, 2, 3]
    windows.drop_passed(np.empty(0, np.int32), [run])
    assert used(windows) == [2, 3], "token 14 sees 9 to 14"
    compute(windows, run, 8)
    assert used(windows) == [2, 3, 4, 20]
    windows.leave(run)
    assert used(windows) == []


def test_room_for_a_prompt_is_what_its_page_and_free_ones_hold() -> None:
    windows, _ = make_windows(num_window_pages=5)
    run = make_run(60)
    windows.begin(run)
    assert windows.count_room(run) == 20
    compute(windows, run, 18)
    assert windows.count_room(run) == 2
    windows.drop_passed(np.empty(0, np.int32), [run])
    assert windows.count_room(run) == 2 + 3 * 4


def grow_to(windows: HeldWindows, table: SequenceTable, seqs: Int32, position: int, pages: list[int]) -> None:
    for at in range(int(table.position[seqs[0]]), position):
        if at % SIZE == 0:
            windows.grow(seqs, np.asarray([pages.pop(0) for _ in seqs], np.int32))
        table.position[seqs] = at + 1


def test_a_sequence_goes_on_with_its_prompts_window() -> None:
    windows, table = make_windows()
    run = make_run(22)
    seqs = table.take(1)
    run.seq, table.head[seqs], run.tail_page = int(seqs[0]), 20, -1
    windows.begin(run)
    compute(windows, run, 22)
    windows.finish(run)
    assert used(windows) == [4, 20], "token 22 sees 17 to 22"
    run.seq = -1
    table.position[seqs] = 22
    grow_to(windows, table, seqs, 33, [30, 31, 32])
    windows.drop_passed(seqs, [])
    assert used(windows) == [31, 32], "token 33 sees 28 to 33"
    windows.check([run], seqs)
    windows.release(seqs)
    assert used(windows) == []


def test_samples_hold_their_prompts_pages_until_each_has_passed() -> None:
    windows, table = make_windows()
    run = make_run(22, n=2)
    windows.begin(run)
    compute(windows, run, 21)
    windows.finish(run)
    seqs = table.take(2)
    windows.fork(run, seqs)
    windows.grow(seqs, np.asarray([30, 31], np.int32))  # copies of the page that is not full
    run.request.next_sample = 2
    windows.leave(run)
    assert used(windows) == [4, 30, 31]
    table.position[seqs] = [24, 26]
    windows.drop_passed(seqs, [])
    assert used(windows) == [4, 30, 31], "the first sees token 19"
    table.position[seqs] = [26, 26]
    windows.drop_passed(seqs, [])
    assert used(windows) == [30, 31]
    windows.release(seqs)
    windows.check([run], seqs)
