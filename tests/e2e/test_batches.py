"""Batches of real servers and of the command: kill -9 of every process in the middle, and on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import openai
import pyarrow as pa
import pyarrow.parquet as pq
from openai.types import Batch

from tests.drivers.until import wait_until
from tests.processes.serving import serving, wait_until_gone
from toka_async.bench.loads.served import list_children

QUESTION = "Wei has 26 apples. Ivan has 2 times as many. How many do they have together?"


def lines(num: int, max_tokens: int) -> bytes:
    """Chats; every tenth is wrong."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": QUESTION}] if number % 10 else [],
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                },
            }
        ).encode()
        + b"\n"
        for number in range(num)
    )


def check(output: bytes, errors: bytes, num: int) -> None:
    """Every line is in one of the files, once."""
    ids = [Counter(json.loads(line)["custom_id"] for line in data.splitlines()) for data in (output, errors)]
    assert ids[0] == Counter(f"c{number}" for number in range(num) if number % 10)
    assert ids[1] == Counter(f"c{number}" for number in range(0, num, 10))


def wait_for(batch: Callable[[], Batch], is_so: Callable[[Batch], bool]) -> Batch:
    return wait_until(lambda: found if is_so(found := batch()) else None, batch)


def num_done(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def end_by_damage(client: openai.OpenAI, folder: Path) -> Batch:
    """A batch whose output file is cut in the middle of a line while it runs."""
    file = client.files.create(file=("in.jsonl", lines(1000, 30)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id), lambda now: num_done(now) > 10)
    start = b'{"id":"batch_req_%s' % batch.id.removeprefix("batch_").encode()
    results = [each for each in folder.iterdir() if each.read_bytes().startswith(start)]
    (output,) = (each for each in results if b'"status_code":200' in each.read_bytes())
    os.truncate(output, output.stat().st_size // 2)
    batch = wait_for(lambda: client.batches.retrieve(batch.id), lambda now: now.status == "failed")
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert (error.code, error.param) == ("output_file_damaged", "output_file_id")
    assert batch.output_file_id == output.name
    return batch


def test_a_batch_outlives_a_kill_of_everything(tmp_path: Path) -> None:
    """And the end of another one, whose file was damaged."""
    overrides = ("model.path=demo", f"server.data_dir={tmp_path / 'data'}", "schedule.max_seqs=8")
    with serving(tmp_path, *overrides) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", lines(100, 30)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        damaged = end_by_damage(client, tmp_path / "data" / "files")
        wait_for(lambda: client.batches.retrieve(batch.id), lambda now: num_done(now) > 20)
        server.signal_group(signal.SIGKILL)
        server.wait()
        wait_until_gone(server.pids)
    with serving(tmp_path, *overrides) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        now = client.batches.retrieve(batch.id)
        assert num_done(now) > 20
        assert client.batches.retrieve(damaged.id) == damaged
        assert damaged.output_file_id is not None
        assert all(map(json.loads, client.files.content(damaged.output_file_id).read().splitlines()))
        now = wait_for(lambda: client.batches.retrieve(batch.id), lambda now: now.status == "completed")
        assert now.metadata == {"a": "b"}
        assert now.output_file_id is not None
        assert now.error_file_id is not None
        check(client.files.content(now.output_file_id).read(), client.files.content(now.error_file_id).read(), 100)
        refused = subprocess.run(
            [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", overrides[1]],
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 2
        assert "is in use by another process" in refused.stderr


def test_the_command_goes_on_where_it_was(tmp_path: Path) -> None:
    """After a signal, which lets it keep what is done, and after a kill."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(300, 10))
    command = [sys.executable, "-m", "toka_async.cli", "batch", "run", "-i", str(source), "-o", str(output)]
    command += ["model.device=simulated", "simulated.step_ms=10", "schedule.max_seqs=8", "cache.num_tokens=4096"]
    end_early(command, tmp_path, 20, os.kill, signal.SIGTERM, 1)
    end_early(command, tmp_path, 100, os.killpg, signal.SIGKILL, -signal.SIGKILL)
    assert output.read_bytes().count(b"\n") < 270
    other = subprocess.run([*command, "model.load=random"], capture_output=True, text=True, timeout=60, check=False)
    assert (other.returncode, "was begun with model.load='weights', and now it is" in other.stderr) == (2, True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1  # lines have failed
    assert "270 lines answered" in done.stderr
    check(output.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes(), 300)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (again.returncode, "toka-async: finished already: 270 lines" in again.stderr) == (1, True)
    retried = subprocess.run([*command, "--retry-failed"], capture_output=True, text=True, timeout=60, check=False)
    assert "continuing: 270 of 300 lines are done" in retried.stderr
    check(output.read_bytes(), (tmp_path / "out.errors.jsonl").read_bytes(), 300)


def test_rows_go_on_where_they_were(tmp_path: Path) -> None:
    """After a kill; then every row of the table has its answer or its error beside it."""
    source, output, answers = (tmp_path / name for name in ("in.parquet", "out.parquet", "out.parquet.progress"))
    prompts = [None if number % 10 == 0 else f"prompt {number}" for number in range(300)]
    pq.write_table(pa.table({"id": range(300), "prompt": prompts}), source)
    command = [sys.executable, "-m", "toka_async.cli", "batch", "run", "-i", str(source), "-o", str(output)]
    command += ["-n", "2", "--max-tokens", "10", "--extra-body", '{"ignore_eos": true}', "--keep", "id"]
    command += ["model.device=simulated", "simulated.step_ms=10", "schedule.max_seqs=8", "cache.num_tokens=4096"]
    end_early(command, tmp_path, 20, os.killpg, signal.SIGKILL, -signal.SIGKILL, answers / "answers.jsonl")
    assert not output.exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1  # rows have failed
    assert "continuing: " in done.stderr
    assert f"270 lines answered in {output}" in done.stderr
    rows = pq.read_table(output).to_pylist()
    assert [row["id"] for row in rows] == list(range(300))
    assert [row["id"] for row in rows if row["error"]] == list(range(0, 300, 10))
    assert all(len(row["generated_text"]) == 2 and row["completion_tokens"] == 20 for row in rows if not row["error"])
    output.unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (again.returncode, "finished already: 270 lines" in again.stderr) == (1, True)
    assert pq.read_table(output).to_pylist() == rows


def end_early(
    command: list[str],
    folder: Path,
    num_lines: int,
    kill: Callable[[int, int], None],
    number: int,
    code: int,
    output: Path | None = None,
) -> None:
    """Runs the command until so many lines are in its output, and a little longer."""
    output = output or folder / "out.jsonl"
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
        wait_until(
            lambda: output.exists() and output.read_bytes().count(b"\n") > num_lines, (folder / "stderr").read_text
        )
        pids = list(list_children(process.pid).values())
        kill(process.pid, number)
        assert process.wait(60) == code
        wait_until_gone(pids)


def test_a_file_that_is_no_batch_is_refused_in_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(3, 1) + b"nonsense\n")
    command = [sys.executable, "-m", "toka_async.cli", "batch", "run", "-i", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, "model.device=simulated"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"toka-async: {source}, line 4: this line is not a JSON object" in done.stderr.splitlines()[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]


def test_lines_for_another_model_are_refused_in_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    wrong = lines(1, 1).replace(b'"body": {', b'"body": {"model": "gpt-4", ').replace(b"c0", b"x")
    source.write_bytes(lines(3, 1) + wrong)
    command = [sys.executable, "-m", "toka_async.cli", "batch", "run", "-i", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, "model.device=simulated"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    message = f"toka-async: {source}, line 4: it asks for the model 'gpt-4', and the one that answers is 'demo'"
    assert message in done.stderr.splitlines()[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]
