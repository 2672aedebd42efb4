"""Whether every division of a small model among processes on this machine answers as one process does: a table.

For every number of replicas, stages and tensor ranks whose product is at most 8 and that the model admits, a server
with real processes (gloo, on the CPU) answers prompts greedily: shared prefixes, several samples, prompts longer than a
step. Tokens must be those of one process, or tie with them within 1e-3 in transformers' logits. Then each kind of
process is killed under load: every client must hear of it or have a whole answer, and no process may be left.

    PYTHONPATH=. python scripts/check_parallel.py                    # all: most of an hour on two cores
    PYTHONPATH=. python scripts/check_parallel.py --only 1,2,1 2,2,2 --no-kills
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes.parallel import OPTIONS, Reference, all_layouts, ask_all, check_tokens, kill_under_load, make_model
from tests.processes.serving import Serving, alive, serving, wait_until_gone
from toka_async.bench.loads.served import list_children
from toka_async.checkpoint.division import tensor_sizes
from toka_async.checkpoint.spec import read_spec
from toka_async.topology import Layout

TOKENS = 24
KILL_TOKENS = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="DP,PP,TP", help="these combinations")
    parser.add_argument("--no-kills", action="store_true", help="compare tokens only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        folder = Path(name)
        os.environ["TMPDIR"] = name
        model = make_model(folder / "model")
        spec = read_spec(model)
        layouts = list(all_layouts(spec.num_layers, tensor_sizes(spec)))
        if options.only:
            layouts = [Layout(*map(int, text.split(","))) for text in options.only]
        reference = Reference(model)
        with started(folder, model, Layout()) as server:
            expected = ask_all(server, TOKENS)
        print(f"{len(expected)} samples of {TOKENS} tokens; transformers' gap {worst(reference, expected):.1e}")
        print("dp pp tp | start s | samples that differ by a tie | killed: right answers, errors")
        failed = 0
        for layout in layouts:
            try:
                print(line(folder, model, layout, reference, expected, not options.no_kills), flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{layout.dp:2} {layout.pp:2} {layout.tp:2} | FAILED: {error}", flush=True)
        print(f"{len(layouts)} combinations, {failed} failed")
    return 1 if failed else 0


def worst(reference: Reference, answers: list[list[int]]) -> float:
    """How far the one process's own tokens are below transformers' likeliest."""
    from tests.processes.parallel import REQUESTS

    prompts = [prompt for prompt, num_samples in REQUESTS for _ in range(num_samples)]
    return max(reference.gap(prompt, tokens) for prompt, tokens in zip(prompts, answers, strict=True))


@contextmanager
def started(folder: Path, model: Path, layout: Layout) -> Iterator[Serving]:
    sizes = (f"parallel.dp={layout.dp}", f"parallel.pp={layout.pp}", f"parallel.tp={layout.tp}")
    with serving(folder, f"model.path={model}", *OPTIONS, *sizes) as server:
        yield server


def line(
    folder: Path, model: Path, layout: Layout, reference: Reference, expected: list[list[int]], kills: bool
) -> str:
    """A row of the table; raises AssertionError when something is wrong."""
    began = time.monotonic()
    with started(folder, model, layout) as server:
        start = time.monotonic() - began
        answers = ask_all(server, TOKENS)
        server.signal_group(signal.SIGTERM)
        assert server.wait() == 0, "the server did not end by itself"
        assert not alive(server.pids)
    num_ties = check_tokens(reference, expected, answers, TOKENS)
    killed = "; ".join(kill_each(folder, model, layout)) if kills else "not tried"
    return f"{layout.dp:2} {layout.pp:2} {layout.tp:2} | {start:7.1f} | {num_ties} of {len(expected)} | {killed}"


def victims(layout: Layout) -> list[str]:
    """One process of each kind, of the last replica: the server, a scheduler, and ranks of the stages' ends."""
    replica = layout.dp - 1
    ranks = dict.fromkeys((0, layout.num_ranks - 1, layout.num_ranks // 2))
    return [f"scheduler-{replica}", *(f"rank-{replica}-{rank}" for rank in ranks), "server"]


def kill_each(folder: Path, model: Path, layout: Layout) -> Iterator[str]:
    """What came of it. With several replicas the same server goes on, but for its own death."""
    names = victims(layout)
    while names:
        with started(folder, model, layout) as server:
            pids = {*server.pids}
            while names:
                name = names.pop(0)
                outcomes = kill_under_load(server, name, KILL_TOKENS)
                assert not outcomes.num_wrong, f"{name} was killed: {outcomes.num_wrong} answers are wrong"
                yield f"{name} {outcomes.num_right}, {outcomes.num_errors}"
                if layout.dp == 1 or name == "server":
                    break
                wait_until_whole(server, name)
                pids |= {*server.pids}
            if layout.dp == 1 or name == "server":
                assert server.wait() == 1, f"{name} was killed: the exit code is {server.process.returncode}"
                wait_until_gone(pids)
            else:
                server.signal_group(signal.SIGTERM)
                server.wait()
                wait_until_gone(pids)


def wait_until_whole(server: Serving, name: str) -> None:
    """Until the replica of the process is back."""
    deadline = time.monotonic() + 120
    old = server.children[name]
    while alive([old]) or server.get("/health")[0] != 200:
        assert time.monotonic() < deadline, f"{name} was killed: its replica is not back"
        time.sleep(0.1)
    server.children = list_children(server.process.pid)


if __name__ == "__main__":
    sys.exit(main())
