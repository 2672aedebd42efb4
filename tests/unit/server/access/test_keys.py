from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Any

import pytest

from toka_async.config import AuthConfig, ConfigError
from toka_async.server.access.keys import PAUSE, Keys, KeySource, read_keys

FIRST, SECOND, THIRD = "sk-first-0123", "sk-second-456", "sk-third-7890"


def read(folder: Path, text: str, variable: str = "") -> Keys:
    path = folder / "keys"
    path.write_text(text if not text or text.endswith("\n") else f"{text}\n")
    return read_keys(AuthConfig(api_keys=str(path)), {"TOKA_API_KEYS": variable})


def test_no_keys() -> None:
    assert not read_keys(AuthConfig(), {})
    assert not read_keys(AuthConfig(), {"TOKA_API_KEYS": ""})


def test_a_file_and_the_environment(tmp_path: Path) -> None:
    text = f"# ours\n{FIRST} alice max_requests=3 max_held_tokens=100\n\n  {SECOND}\n"
    keys = read(tmp_path, text, f"{THIRD}, sk-fourth-00")
    alice, second, third = (keys.find(each) for each in (FIRST, SECOND, THIRD))
    assert alice is not None
    assert (alice.name, alice.max_requests, alice.max_tokens) == ("alice", 3, 100)
    assert second is not None
    assert (second.name, second.max_requests, second.max_tokens) == ("line-4", None, None)
    assert third is not None
    assert third.name == "TOKA_API_KEYS-1"
    assert keys.find("sk-fourth-00") is not None
    assert all(each not in repr(keys) for each in (FIRST, SECOND, THIRD))


def test_comments(tmp_path: Path) -> None:
    """At the end of a line too; a key may have the sign in it."""
    keys = read(tmp_path, f"#{SECOND}\n{FIRST} alice max_requests=3 # max_requests=4\n{THIRD}#x # bob #\n  # end")
    assert [(key.name, key.max_requests) for key in keys.keys] == [("alice", 3), ("line-3", None)]
    assert keys.find(f"{THIRD}#x") is not None


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """Whoever opens it waits until somebody writes, and the server does nothing else meanwhile."""
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"^auth\.api_keys: .*/keys: a pipe, not a file"):
        read_keys(AuthConfig(api_keys=str(tmp_path / "keys")), {})


@pytest.mark.parametrize("wrong", ["", FIRST[:-1], FIRST + "x", FIRST.upper(), "\udcff", "é" * 12, "\x00"])
def test_a_wrong_key(tmp_path: Path, wrong: str) -> None:
    assert read(tmp_path, FIRST).find(wrong) is None


def test_a_file_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys come and go with it; what is wrong with it changes nothing."""
    path, now = tmp_path / "keys", [0.0]
    path.write_text(f"{FIRST} alice\n")
    source = KeySource(AuthConfig(api_keys=str(path)), {}, lambda: now[0])

    def known() -> list[bool]:
        return [source().find(each) is not None for each in (FIRST, SECOND)]

    path.write_text(f"{FIRST} alice\n{SECOND} bob\n")
    assert known() == [True, False]  # it was looked at a moment ago
    now[0] += PAUSE
    assert known() == [True, True]
    for wrong in ("", "short", None):
        if wrong is None:
            path.unlink()
        else:
            path.write_text(wrong)
        now[0] += PAUSE
        assert known() == [True, True]
    assert caplog.text.count("the API keys stay as they were: auth.api_keys: ") == 3
    path.write_text(f"{SECOND} bob max_requests=7\n")
    now[0] += PAUSE
    assert known() == [False, True]
    bob = source().find(SECOND)
    assert bob is not None
    assert bob.max_requests == 7
    assert FIRST not in caplog.text


def test_a_file_that_is_half_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A part of a key is not a key."""
    path, now = tmp_path / "keys", [0.0]
    path.write_text(f"{FIRST}\n{SECOND} bob max_requests=7\n")
    source = KeySource(AuthConfig(api_keys=str(path)), {}, lambda: now[0])
    for part in (f"{FIRST}", f"{FIRST}\n{SECOND[:-2]}", f"{FIRST}\n{SECOND} bob"):
        path.write_text(part)
        now[0] += PAUSE
        assert source().find(SECOND[:-2]) is None
        bob = source().find(SECOND)
        assert bob is not None
        assert bob.max_requests == 7
        with pytest.raises(ConfigError, match="it has no end, as in a file that is half written"):
            read_keys(AuthConfig(api_keys=str(path)), {})
    assert caplog.text.count("it has no end") == 3
    path.write_text(f"{FIRST}\n{SECOND} bob\n")
    now[0] += PAUSE
    assert source() == read_keys(AuthConfig(api_keys=str(path)), {})


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{FIRST}\n")
    read_text = Path.read_text

    def read_late(self: Path, encoding: str) -> str:
        text = read_text(self, encoding=encoding)
        self.write_text(f"{FIRST}\n{SECOND}\n")
        return text

    monkeypatch.setattr(Path, "read_text", read_late)
    with pytest.raises(ConfigError, match="changed while it was read"):
        read_keys(AuthConfig(api_keys=str(path)), {})


def test_a_key_that_sees_all(tmp_path: Path) -> None:
    keys = read(tmp_path, f"{FIRST} prometheus metrics=all max_requests=1\n{SECOND} metrics=all\n{THIRD} bob\n")
    assert [(key.name, key.sees_all) for key in keys.keys] == [("prometheus", True), ("line-2", True), ("bob", False)]


def test_every_key_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = read(tmp_path, f"{FIRST}\n{SECOND}\n{THIRD}")
    compared: list[tuple[int, int]] = []
    plain = hmac.compare_digest

    def compare(left: Any, right: Any) -> bool:
        compared.append((len(left), len(right)))
        return plain(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for text in (FIRST, THIRD, "x"):
        keys.find(text)
    assert compared == [(32, 32)] * 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("# nothing\n\n", "has no keys"),
        ("short", "line 1: a key has at least 8"),
        (f"{FIRST}\nschlüssel-123", "line 2: a key has"),
        (f"{FIRST} alice max_request=3", "line 1: expected KEY"),
        (f"{FIRST} alice max_requests=-3", "line 1: expected KEY"),
        (f"{FIRST} alice metrics=some", "line 1: expected KEY"),
        (f"{FIRST} alice bob", "line 1: expected KEY"),
        (f"{FIRST} al/ice", "line 1: a name has"),
        (f"{FIRST} alice\n{FIRST} bob", "the same text"),
        (f"{FIRST} alice\n{SECOND} alice", "the same name"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^auth\.api_keys: .*{message}") as caught:
        read(tmp_path, text)
    assert FIRST not in str(caught.value)


@pytest.mark.parametrize("name", ["none", ".", "nul\0"])
def test_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^auth\.api_keys: "):
        read_keys(AuthConfig(api_keys=str(tmp_path / name)), {})


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_keys(AuthConfig(api_keys=str(tmp_path / "keys")), {})


@pytest.mark.parametrize("variable", [",", " ", "short", "sk-first-0123,sk-first-0123"])
def test_a_wrong_variable(variable: str) -> None:
    with pytest.raises(ConfigError, match=r"TOKA_API_KEYS|auth\.api_keys") as caught:
        read_keys(AuthConfig(), {"TOKA_API_KEYS": variable})
    assert FIRST not in str(caught.value)


def test_keys_without_names_in_both_files(tmp_path: Path) -> None:
    api, admin = tmp_path / "api", tmp_path / "admin"
    api.write_text(f"{FIRST}\n")
    admin.write_text(f"{SECOND}\n")
    keys = read_keys(AuthConfig(api_keys=str(api), admin_keys=str(admin)), {})
    assert [(key.name, key.is_admin) for key in keys.keys] == [("line-1", False), ("admin-line-1", True)]


def test_admins(tmp_path: Path) -> None:
    path, now = tmp_path / "admins", [0.0]
    path.write_text(f"{SECOND} trainer\n")
    config = AuthConfig(admin_keys=str(path))
    keys = read_keys(config, {"TOKA_API_KEYS": FIRST, "TOKA_ADMIN_KEYS": THIRD})
    assert [(key.name, key.is_admin) for key in keys.keys] == [
        ("TOKA_API_KEYS-1", False),
        ("trainer", True),
        ("TOKA_ADMIN_KEYS-1", True),
    ]
    assert keys.have_admins
    assert not read_keys(AuthConfig(), {"TOKA_API_KEYS": FIRST}).have_admins
    with pytest.raises(ConfigError, match=r"^auth\.admin_keys: two keys have the same text"):
        read_keys(config, {"TOKA_API_KEYS": SECOND})
    source = KeySource(config, {}, lambda: now[0])
    path.write_text(f"{SECOND} trainer\n{THIRD} other\n")
    now[0] = PAUSE
    assert len(source().keys) == 2
