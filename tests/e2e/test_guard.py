"""A server with certificate and keys, as a user starts it; starts that must not succeed; a server behind nginx."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.drivers.until import wait_until
from tests.processes.certificates import make_certificate
from tests.processes.nginx import Proxy, find_nginx, proxying
from tests.processes.serving import Serving, serving
from toka_async.cli import main

KEY, OTHER = "sk-e2e-0123456", "sk-e2e-variable"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("guard")
    make_certificate(made)
    (made / "keys").write_text(f"{KEY} alice max_requests=1\n")
    return made


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Serving]:
    files = (f"server.tls_cert={folder}/server.pem", f"server.tls_key={folder}/server.key")
    keys = (f"auth.api_keys={folder}/keys", "limits.request_timeout=5")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("TOKA_API_KEYS", OTHER)
        server = stack.enter_context(serving(folder, "model.device=simulated", *files, *keys))
        patch.undo()
        yield server


def ask(server: Serving, folder: Path, path: str, key: str = "", body: object = None) -> tuple[int, bytes]:
    """Status and body."""
    headers = JSON | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    context = ssl.create_default_context(cafile=folder / "server.pem")
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_https_with_keys(running: Serving, folder: Path) -> None:
    assert running.url.startswith("https://127.0.0.1:")
    assert ask(running, folder, "/health")[0] == 200
    for path in ("/v1/models", "/metrics"):
        assert [ask(running, folder, path, key)[0] for key in ("", "sk-wrong-key", KEY, OTHER)] == [401, 401, 200, 200]
    body = {"prompt": "x", "max_tokens": 20, "stream": True}
    status, events = ask(running, folder, "/v1/completions", KEY, body)
    assert status == 200
    assert events.endswith(b"data: [DONE]\n\n")
    assert ask(running, folder, "/v1/completions", KEY, {"prompt": ["x", "y"], "max_tokens": 1})[0] == 400


def test_a_key_finds_its_own_prompts_only(running: Serving, folder: Path) -> None:
    """What of a guess is cached would tell whether another has asked it."""

    def num_cached(key: str, **fields: str) -> int:
        body = {"prompt": list(range(5, 45)), "max_tokens": 1, **fields}
        status, answer = ask(running, folder, "/v1/completions", key, body)
        assert status == 200
        cached: int = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    asked = [(KEY, {}), (KEY, {}), (OTHER, {}), (OTHER, {}), (KEY, {"cache_salt": "a"}), (KEY, {"cache_salt": "a"})]
    assert [num_cached(key, **fields) for key, fields in asked] == [0, 32, 0, 32, 0, 32]


def test_plain_http_gets_nothing(running: Serving, folder: Path) -> None:
    host, port = running.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in raw.recv(4096)
    assert ask(running, folder, "/health")[0] == 200


def test_ping_has_a_key_too(running: Serving, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "server.pem"))
    command = [sys.executable, "-m", "toka_async.cli", "ping", "x", "--max-tokens", "4", "--url", running.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "set TOKA_API_KEY" in done.stderr) == (1, True)
    monkeypatch.setenv("TOKA_API_KEY", KEY)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end(running: Serving) -> None:
    """No key and no prompt was written anywhere."""
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert "sk-e2e" not in running.said()


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("server.tls_cert", "none.pem", "server.tls_key={}/server.key"),
        ("server.tls_key", "keys", "server.tls_cert={}/server.pem"),
        ("auth.api_keys", "none", ""),
        ("auth.api_keys", "server.key", ""),
    ],
)
def test_wrong_files_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, other: str
) -> None:
    overrides = [f"{key}={folder}/{value}", *([other.format(folder)] if other else [])]
    assert main(["serve", "server.port=0", *overrides]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"toka-async: {key}: ")
    assert written.err.count("\n") == 1


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Proxy]]:
    """A server whose answers take a minute, and an nginx in front of it. One that is named has to be there."""
    program = find_nginx()
    if program is None:
        pytest.skip("there is no nginx: install Debian's package `nginx`, or name one in NGINX")
    if shutil.which(program) is None:
        pytest.fail(f"NGINX={program}: there is no such program")
    simulated = ("model.device=simulated", "simulated.step_ms=50", "limits.max_body_mb=1")
    with (
        serving(tmp_path_factory.mktemp("behind"), *simulated) as server,
        proxying(program, tmp_path_factory.mktemp("nginx"), urlsplit(server.url).netloc, "1m") as proxy,
    ):
        yield server, proxy


def test_a_proxy_passes_tokens_on_and_tells_when_a_client_leaves(behind: tuple[Serving, Proxy]) -> None:
    server, proxy = behind
    body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True})
    with closing(proxy.connect()) as connection:
        connection.request("POST", "/v1/completions", body, JSON)
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: {")
            assert server.metric("num_requests_running") == 1, "the first token is here, the last is not made yet"
    wait_until(lambda: not server.metric("num_requests_running"))


def test_a_proxy_takes_bodies_of_the_same_size(behind: tuple[Serving, Proxy]) -> None:
    _, proxy = behind
    for size, status in ((500_000, 200), (2_000_000, 413)):
        with closing(proxy.connect()) as connection:
            connection.request("POST", "/tokenize", json.dumps({"prompt": "x" * size}), JSON)
            with connection.getresponse() as response:
                assert response.status == status
                assert status != 200 or json.loads(response.read())["count"] > 0
