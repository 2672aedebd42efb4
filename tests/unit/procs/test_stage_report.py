from __future__ import annotations

from toka_async.arrays import EMPTY
from toka_async.messages import FromRank, StageTimes, StepDone
from toka_async.procs.stage_report import StageReport


class Results:
    def __init__(self) -> None:
        self.sent: list[FromRank] = []

    def send(self, message: FromRank) -> None:
        self.sent.append(message)

    def close(self) -> None:
        raise AssertionError("closed while in use")


def test_sums_of_all_steps_are_sent_now_and_then() -> None:
    results, now = Results(), [7.0]
    report = StageReport(2, results, lambda: now[0])
    for wait in (0.0, 0.125, 0.125, 0.125, 0.25):
        now[0] += wait
        report.add(StepDone(step_id=0, token_ids=EMPTY, seconds=1.0, stalled=0.25, waited=0.5))
    assert results.sent == [StageTimes(2, 1.0, 0.25, 0.5), StageTimes(2, 3.0, 0.75, 1.5), StageTimes(2, 5.0, 1.25, 2.5)]
