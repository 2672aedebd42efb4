"""A long storm over a server: nothing that it accepted may be lost, and nothing may be left of it.

Clients over HTTP, files and batches, and ZeroMQ ask what has one right answer (the model is simulated), leave, cancel
and come back; meanwhile processes are killed (SIGKILL), stopped (SIGSTOP) and started again. Three parts, 4 : 3 : 3 of
the time: every process is killed; those of replicas are; none is, for memory to be looked at. Prints figures every half
minute and, at the end, all of them as JSON. Exits with 1 when an item did not end exactly once or ended wrongly, a
descriptor, page, file or process is left, or memory grows.

    PYTHONPATH=. python scripts/chaos.py --minutes 10 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.chaos.killer import EVERYTHING, REPLICAS
from tests.chaos.leaks import uses
from tests.chaos.memory import Memory, growing
from tests.chaos.storm import Era, Storm, short_folder

SHARES = (0.4, 0.3, 0.3)
PAUSE = 3.0  # seconds between two deaths, on average
REPORT = 30.0
SHOWN = 500  # characters of a fault
SETTLE = 60.0  # seconds in which everything must have ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds between two deaths, on average")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=2.0, help="milliseconds of a simulated step")
    parser.add_argument("--log", type=Path, help="where what the servers said is kept")
    options = parser.parse_args()
    with short_folder() as folder:
        storm = Storm(folder, options.seed, step_ms=options.step_ms, request_timeout=3, num_replicas=options.replicas)
        try:
            figures = asyncio.run(rage(storm, options.minutes * 60, options.pause))
        finally:
            if options.log is not None:
                options.log.write_text(storm.service.said(), encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 1 if figures["faults"] or figures["lost"] else 0


async def rage(storm: Storm, seconds: float, pause: float) -> dict[str, object]:
    kinds = (EVERYTHING, REPLICAS, ())
    names = ("everything", "replicas", "clients")
    eras = [Era(name, share * seconds, pause, kind) for name, share, kind in zip(names, SHARES, kinds, strict=True)]
    memory, reporter = Memory(), Reporter(storm)

    def watch(era: Era) -> None:
        if reporter.show(era):
            memory.forget()  # another part begins
        memory.take(time.monotonic(), uses(storm.service))

    outcome = await storm.run(eras, watch, SETTLE)
    of_memory = memory.figures(outcome.final)
    outcome.tally.faults += growing(of_memory)
    descriptors = {
        name: {"before": use.num_fds, "after": outcome.final[name].num_fds} for name, use in outcome.baseline.items()
    }
    return {
        **outcome.tally.figures(),
        "minutes": round(seconds / 60, 1),
        "starts": outcome.num_starts,
        "refused_starts": outcome.num_refused,
        "exit_codes": outcome.exit_codes,
        "descriptors": descriptors,
        "memory": of_memory,
        "final": {name: asdict(use) for name, use in outcome.final.items()},
    }


class Reporter:
    """Says now and then how it goes."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._began = self._shown = time.monotonic()
        self._era = ""
        self._num_faults = 0

    def show(self, era: Era) -> bool:
        """Whether another part has begun."""
        now, is_new = time.monotonic(), era.name != self._era
        if is_new or now - self._shown >= REPORT:
            tally, self._shown, self._era = self._storm.outcome.tally, now, era.name
            kills = sum(count for kind, count in tally.kills.items() if "cut" not in kind)
            print(
                f"{now - self._began:5.0f} s, {era.name}: {tally.num_items} items, {kills} kills, "
                f"{tally.num_open} under way, {tally.num_wrong} wrong, {len(tally.faults)} faults",
                flush=True,
            )
            for fault in tally.faults[self._num_faults :]:
                print(f"  {fault[:SHOWN]}", flush=True)
            self._num_faults = len(tally.faults)
        return is_new


if __name__ == "__main__":
    sys.exit(main())
