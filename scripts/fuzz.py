"""Sends made-up things to a real server, by hand and for as long as one likes: nothing may be the server's fault.

    PYTHONPATH=. python scripts/fuzz.py 1000 --seconds 300   # examples of each part; seconds for http
    PYTHONPATH=. python scripts/fuzz.py 20000 --parts direct client lines --seed 7

http: requests by schemathesis from the served document, streams among them; statuses, media types and
schemas of answers are checked against the document. forms: uploads. direct: messages to the ZeroMQ endpoint. batch: one
of almost right lines. In this process: client (what a server says to the client of direct submission), lines and files
(of batches). Afterwards the server has to answer as before, with nothing left of it all. The exit code is 1 when
something was found.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hypothesis import strategies as st

from tests.cases.drawn import drawn
from tests.cases.forms import FORMS, TYPES, content_type
from tests.cases.lines import FILES, LINES, check_file, check_line, encoded
from tests.cases.wire_messages import HEARD, SAID, Client
from tests.processes.garbage import garbage
from tests.processes.http_fuzz import SMALL, fuzz, load, run_batch, seeded
from tests.processes.serving import Serving, free_port, serving


@dataclass(frozen=True, slots=True)
class World:
    """What is fuzzed, and how much. url: of the ZeroMQ endpoint."""

    server: Serving
    url: str
    folder: Path
    examples: int
    seconds: int
    seed: int


Part = Callable[[World], tuple[int, str]]  # the cases, and a word on what became of them; fails otherwise


def fuzz_http(world: World) -> tuple[int, str]:
    options = ("--phases=coverage,fuzzing,stateful", f"--max-time={world.seconds}")
    tried = fuzz(world.server, world.folder, seeded(world.server), *options, seed=world.seed)
    for path, counts in sorted(tried.statuses.items()):
        if counts.total():
            print(f"  {path:32}", "  ".join(f"{status}: {count}" for status, count in sorted(counts.items())))
    if not tried.passed:
        print(tried.output)
    assert tried.passed
    assert not tried.num_5xx, f"{tried.num_5xx} answers of 5xx"
    return tried.num_cases, "0 of 5xx"


def fuzz_forms(world: World) -> tuple[int, str]:
    parts, statuses = urlsplit(world.server.url), Counter[int]()
    for (data, boundary), kind in drawn(st.tuples(FORMS, TYPES), world.examples, world.seed):
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)) as connection:
            headers = {"Content-Type": content_type(boundary, kind).encode()}
            connection.request("POST", "/v1/files", data, headers)
            status = connection.getresponse().status
        assert status in (200, 400, 413, 415), (status, data, boundary, kind)
        statuses[status] += 1
    return statuses.total(), str(dict(statuses))


def fuzz_direct(world: World) -> tuple[int, str]:
    with garbage(world.url) as client:
        for messages in drawn(SAID, world.examples, world.seed):
            client.send(messages)
    return client.num_messages, f"{client.num_answers} answers"


def fuzz_client(world: World) -> tuple[int, str]:
    cases = drawn(HEARD, world.examples, world.seed)
    for messages in cases:
        Client().hear(messages)
    return sum(map(len, cases)), "messages"


def fuzz_lines(world: World) -> tuple[int, str]:
    lines = drawn(LINES, world.examples, world.seed)
    for line in lines:
        check_line(encoded(line, "a"), "")
    files = drawn(FILES, world.examples, world.seed)
    for data in files:
        check_file(world.folder / "lines", data)
    return len(lines) + len(files), f"{len(lines)} lines, {len(files)} files"


def fuzz_batch(world: World) -> tuple[int, str]:
    counts = run_batch(world.server, drawn(LINES, world.examples, world.seed)).request_counts
    assert counts is not None
    return counts.total, f"{counts.completed} completed, {counts.failed} failed"


PARTS: dict[str, Part] = {
    "http": fuzz_http,
    "forms": fuzz_forms,
    "direct": fuzz_direct,
    "batch": fuzz_batch,
    "client": fuzz_client,
    "lines": fuzz_lines,
}


def run_part(name: str, world: World) -> bool:
    began = time.monotonic()
    try:
        num_cases, what = PARTS[name](world)
        check_serves(world.server)
    except Exception:
        traceback.print_exc()
        print(f"{name:8} failed")
        return False
    print(f"{name:8} {num_cases:8} cases   {what}   {time.monotonic() - began:.0f} s", flush=True)
    return True


def check_serves(server: Serving) -> None:
    """Nothing of what was sent is left, and a request is answered."""
    assert server.process.poll() is None, "the server has ended"
    assert not load(server)["requests"], load(server)
    status, answer = server.post("/v1/completions", prompt="Question:", max_tokens=8, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=int, nargs="?", default=100)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toka-fuzz-") as name:
        folder, url = Path(name), f"tcp://127.0.0.1:{free_port()}"
        options = (*SMALL, f"server.data_dir={folder / 'data'}", f"zmq.bind={url}")
        with serving(folder, *options) as server:
            world = World(server, url, folder, args.examples, args.seconds, args.seed)
            good = [run_part(part, world) for part in args.parts]
            said = server.said()
    if "Traceback" in said:
        print(said)
    return int(not all(good) or "Traceback" in said)


if __name__ == "__main__":
    sys.exit(main())
