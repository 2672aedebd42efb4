"""nginx with the example of a reverse proxy in front of a server. NGINX names the program; else it is looked for."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.drivers.until import wait_until
from tests.processes.certificates import make_certificate
from tests.processes.serving import free_port

EXAMPLE = Path(__file__).parents[2] / "configs" / "proxy" / "nginx.conf"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def find_nginx() -> str | None:
    """The program; None where there is none."""
    return os.environ.get("NGINX") or shutil.which("nginx")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running one."""

    port: int
    certificate: Path

    def connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.certificate))
        return http.client.HTTPSConnection("localhost", self.port, timeout=30, context=context)


@contextmanager
def proxying(program: str, folder: Path, server: str, max_body: str) -> Iterator[Proxy]:
    """In front of the server at HOST:PORT, with the example as it is but for names and one limit.

    Asserts that nginx finds nothing wrong with the example.
    """
    port, (certificate, key) = free_port(), make_certificate(folder)
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in {
        "127.0.0.1:10210": server,
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "llm.example.org": "localhost",
        "/etc/ssl/toka-async/fullchain.pem": str(certificate),
        "/etc/ssl/toka-async/privkey.pem": str(key),
        "client_max_body_size 64m": f"client_max_body_size {max_body}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "toka-async.conf").write_text(text, encoding="utf-8")
    paths = "".join(f"{name}_temp_path {folder / name};" for name in TEMPORARY)
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}"
        f"http {{ access_log off; {paths} include {folder}/toka-async.conf; }}"
    )
    command = [program, "-p", str(folder), "-e", str(folder / "log"), "-c", str(folder / "nginx.conf")]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    assert "[warn]" not in tried.stderr
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: _listens(port, process))
        yield Proxy(port, certificate)
    finally:
        process.terminate()
        process.wait()


def _listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        try:
            connection.connect()
        except ConnectionRefusedError:
            return False
        return True
