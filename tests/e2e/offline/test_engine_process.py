"""Ends of the engine of an `LLM`, of all kinds. Nothing is left behind, and calls say why they fail."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.until import SECONDS, wait_until
from tests.processes.serving import alive, wait_until_gone
from toka_async import LLM, AsyncLLM, EngineDeadError, SamplingParams
from toka_async.bench.loads.served import list_children
from toka_async.checkpoint.json_file import ModelError

pytestmark = pytest.mark.usefixtures("socket_folders")
SIMULATED: dict[str, Any] = {"device": "simulated", "max_num_seqs": 8}
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
SLOW: dict[str, Any] = {**SIMULATED, "simulated": {"step_ms": 50}}


def list_own_children() -> dict[str, int]:
    """Lists this process's children, without the one that Python's multiprocessing starts for other tests."""
    return {name: pid for name, pid in list_children(os.getpid()).items() if "resource_tracker" not in name}


def find_engine() -> dict[str, int]:
    """The processes of the only engine of this process, by name; its own is `engine`."""
    (engine,) = list_own_children().values()
    return {"engine": engine, **list_children(engine)}


def test_shutdown_ends_everything_and_later_calls_say_so(socket_folders: Path) -> None:
    llm = LLM("demo", **SIMULATED)
    pids = find_engine()
    assert len(pids) == 4
    llm.shutdown()
    assert not alive(pids.values())
    assert not list(socket_folders.iterdir())
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([5], LONG)


def test_an_engine_ends_with_its_object(socket_folders: Path) -> None:
    llm = LLM("demo", **SIMULATED)
    llm.generate([5], SamplingParams(max_tokens=2))
    pids = find_engine()
    del llm
    gc.collect()
    wait_until_gone(pids.values())
    assert not list(socket_folders.iterdir())


@pytest.mark.parametrize("victim", ["rank-0-0", "engine"])
def test_calls_fail_when_a_process_is_killed(victim: str) -> None:
    with LLM("demo", **SLOW) as llm:
        pids = find_engine()
        bar = FirstBar()

        def kill() -> None:
            bar.begun.wait()
            os.kill(pids[victim], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        prompts = [[5], *([[6]] * 20)]
        params = [SamplingParams(max_tokens=1, ignore_eos=True), *([LONG] * 20)]
        with pytest.raises(Exception, match=r"SIGKILL|has ended"):
            llm.generate(prompts, params, use_tqdm=bar.make)
        killer.join()
        wait_until_gone(pids.values())
        with pytest.raises(EngineDeadError):
            llm.generate([5], LONG)


class FirstBar:
    """A bar that notes the first answer."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def make(self, **_options: Any) -> FirstBar:
        return self

    def update(self, _n: int) -> None:
        self.begun.set()

    def close(self) -> None: ...


async def test_streams_fail_when_the_engine_ends() -> None:
    async with AsyncLLM("demo", **SLOW) as llm:
        with pytest.raises(EngineDeadError):  # noqa: PT012
            async for _ in llm.generate([5], LONG, "r"):
                llm.shutdown()


@pytest.mark.parametrize(
    ("model", "options", "error", "part"),
    [
        ("/nowhere", {}, ModelError, "no such directory"),
        ("demo", {"tensor_parallel_size": 7, "device": "cpu"}, ModelError, "tp"),
        ("demo", {**SIMULATED, "model.chat_template": "wrong.jinja"}, EngineDeadError, r"did not start(.|\n)*template"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    model: str,
    options: dict[str, Any],
    error: type[Exception],
    part: str,
    socket_folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "wrong.jinja").write_text("{% wrong")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=part):
        LLM(model, **options)
    assert not list_own_children()
    assert not list(socket_folders.iterdir())


def test_others_cannot_use_the_engines_http_port() -> None:
    import urllib.error
    import urllib.request

    with LLM("demo", **SIMULATED):
        server = find_engine()["server"]
        port = listening_port(server)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=SECONDS)


def listening_port(pid: int) -> int:
    """The TCP port that a process listens at."""
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            return int(fields[1].rpartition(":")[2], 16)
    raise AssertionError("it listens nowhere")


SCRIPT = """
import sys
from toka_async import LLM, SamplingParams
if "loading" in sys.argv:
    print("loading", flush=True)
llm = LLM("demo", device="simulated" if "simulated" in sys.argv else "cpu", max_num_seqs=8, cache={"num_tokens": 32768})
if "fork" in sys.argv:
    import os
    if not (pid := os.fork()):
        try:
            llm.generate([5])
        except RuntimeError as error:
            print(error, flush=True)
        sys.exit()
    os.waitpid(pid, 0)
if "with copy" in sys.argv:
    import os
    if not os.fork():
        sys.exit(sys.stdin.read())
if "short" in sys.argv:
    print(llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids, flush=True)
else:
    print("ready", flush=True)
    llm.generate([[5]] * 2000, SamplingParams(max_tokens=2000, ignore_eos=True))
"""


def start_script(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes, text=True)


def test_a_script_that_just_ends_leaves_nothing_and_says_nothing(socket_folders: Path) -> None:
    with start_script("short", "simulated") as script:
        said, errors = script.communicate(timeout=SECONDS)
    assert script.returncode == 0
    assert len(said.split(",")) == 3
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert not list(socket_folders.iterdir())


def test_a_script_may_have_no_standard_error() -> None:
    command = f"exec {sys.executable} -c '{SCRIPT}' short simulated 2>&-"
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    assert len(said.split(",")) == 3


def test_the_engine_may_print_and_imports_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    noise = "import sys\nif 'serve' in sys.orig_argv: print('noise ' * 40_000, flush=True)"  # more than a pipe holds
    (tmp_path / "sitecustomize.py").write_text(noise)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "msgspec.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    with LLM("demo", **SIMULATED) as llm:
        assert llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True))
    said = capfd.readouterr()
    assert not said.out
    assert said.err.count("noise") == 40_000
    assert "serving demo at" not in said.err


def test_a_copy_of_the_process_leaves_the_engine_alone() -> None:
    with start_script("fork", "short", "simulated") as script:
        said, _ = script.communicate(timeout=SECONDS)
    assert script.returncode == 0
    of_copy, of_script = said.splitlines()
    assert f"belongs to process {script.pid}" in of_copy
    assert len(of_script.split(",")) == 3


@pytest.mark.parametrize("state", ["loading", "generating"])
def test_an_interrupted_script_ends_as_scripts_do(state: str, socket_folders: Path) -> None:
    with start_script(*(["loading"] if state == "loading" else ["simulated"])) as script:
        pids = wait_for_engine(script, state)
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=SECONDS)
    assert "KeyboardInterrupt" in errors
    wait_until_gone(pids.values())
    assert not list(socket_folders.glob("**/*")), errors


@pytest.mark.parametrize("state", ["loading", "generating", "with copy"])
def test_a_killed_script_takes_its_engine_along(state: str) -> None:
    """Also while a copy of the script lives, made by fork, such as a worker of a data loader."""
    with start_script(*(["loading"] if state == "loading" else ["simulated", state])) as script:
        pids = wait_for_engine(script, state)
        script.kill()
        script.wait(SECONDS)
        wait_until_gone([pid for name, pid in pids.items() if name != "with copy"])


def wait_for_engine(script: subprocess.Popen[str], state: str) -> dict[str, int]:
    """Wait until the script's engine is in that state; returns its processes."""
    assert script.stdout is not None
    assert script.stdout.readline()
    if state == "loading":
        wait_until(lambda: any(name.startswith("rank") for name in find_all(script.pid)))
    return find_all(script.pid)


def find_all(parent: int) -> dict[str, int]:
    """All processes below one, as far as they have begun, by name."""
    found = list_children(parent)
    for pid in list(found.values()):
        found |= list_children(pid)
    return found
