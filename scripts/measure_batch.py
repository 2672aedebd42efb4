#!/usr/bin/env python3
"""A large batch on the simulated rank: lines/s, memory of the server's process, and what kill -9 in the middle costs.

    .venv/bin/python scripts/measure_batch.py --lines 100000

Everything is killed at once when a share of the lines is done; the server is started again on the same folder, and at
the end every line is looked for in the two files. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from toka_async.bench.loads.served import list_children

BOUNDARY = "a-boundary-that-is-in-no-line"


class Server:
    """`toka-async serve` in a process group of its own."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", "model.device=simulated"]
        command += [f"server.data_dir={folder}", "log.stats_interval=0", "cache.num_tokens=1048576", *overrides]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        self.ready = time.monotonic()
        self.url = line.split()[-1]
        self.children = list_children(self.process.pid)

    def memory(self, field: str) -> float:
        """MiB of the server's process: VmRSS now, VmHWM at most until now."""
        status = Path(f"/proc/{self.children['server']}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:")) / 1024

    def ask(self, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        request = urllib.request.Request(f"{self.url}/v1/{path}", body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.loads(response.read())

    def answer_ms(self, num: int = 20) -> float:
        """Median time of a chat of 16 tokens, one after the other."""
        body = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 16, "ignore_eos": True}
        times = []
        for _ in range(num):
            start = time.monotonic()
            self.ask("chat/completions", json.dumps(body).encode())
            times.append(1000 * (time.monotonic() - start))
        return statistics.median(times)

    def kill(self) -> None:
        """Every process at the same moment."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_until(self, batch_id: str, num_done: int) -> tuple[dict[str, Any], float]:
        """The batch, and when, once so many lines are done; it is asked a few times a second."""
        while True:
            batch = self.ask(f"batches/{batch_id}")
            counts = batch["request_counts"]
            if counts["completed"] + counts["failed"] >= num_done or batch["status"] in ("completed", "failed"):
                return batch, time.monotonic()
            time.sleep(0.05)


def upload(server: Server, num_lines: int, max_tokens: int) -> str:
    lines = (
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": f"What is {number} and {number % 97}? " * 4}],
                    "max_tokens": max_tokens,
                },
            }
        )
        for number in range(num_lines)
    )
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    body = (head + "\n".join(lines) + f"\r\n--{BOUNDARY}--\r\n").encode()
    file_id: str = server.ask("files", body, f"multipart/form-data; boundary={BOUNDARY}")["id"]
    return file_id


def check(server: Server, batch: dict[str, Any], num_lines: int) -> int:
    """Lines that are lost or there twice."""
    found: Counter[str] = Counter()
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            with urllib.request.urlopen(f"{server.url}/v1/files/{batch[name]}/content", timeout=300) as response:
                for line in response:
                    found[json.loads(line)["custom_id"]] += 1
    return sum(abs(found[f"line-{number}"] - 1) for number in range(num_lines)) + len(found) - num_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--kill-at", type=float, default=0.5, help="share of the lines; 0: nothing is killed")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options)))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    server = Server(folder, options.overrides)
    result: dict[str, float] = {"lines": options.lines, "idle_mib": server.memory("VmRSS")}
    result["answer_idle_ms"] = server.answer_ms()
    try:
        start = time.monotonic()
        file_id = upload(server, options.lines, options.max_tokens)
        result["upload_s"] = time.monotonic() - start
        wanted = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        start = time.monotonic()
        batch_id = server.ask("batches", json.dumps(wanted).encode())["id"]
        _, first = server.wait_until(batch_id, 1)
        result["first_line_s"] = first - start
        result["answer_busy_ms"] = server.answer_ms()
        goal = int(options.lines * options.kill_at)
        if goal:
            batch, now = server.wait_until(batch_id, goal)
            result["lines_per_s"] = batch["request_counts"]["completed"] / (now - first)
            result["peak_mib"] = server.memory("VmHWM")
            server.kill()
            server = Server(folder, options.overrides)
            result["restart_s"] = server.ready - server.started
            done = server.ask(f"batches/{batch_id}")["request_counts"]["completed"]
            _, again = server.wait_until(batch_id, done + 1)
            result["restart_to_next_line_s"] = again - server.started
        batch, end = server.wait_until(batch_id, options.lines + 1)
        if not goal:
            result["lines_per_s"] = options.lines / (end - first)
        result["peak_mib"] = max(result.get("peak_mib", 0), server.memory("VmHWM"))
        result["lost_or_repeated"] = check(server, batch, options.lines)
    finally:
        server.kill()
    return {name: round(value, 2) for name, value in result.items()}


if __name__ == "__main__":
    main()
