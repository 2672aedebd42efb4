from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from toka_async.transport.curve import Clients, KeyFileError, check_clients, make_keys, read_pair, read_public


def test_a_pair(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path / "new", "ours")
    assert (public.name, secret.name) == ("ours.key", "ours.key_secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    pair = read_pair(secret)
    assert zmq.curve_public(pair.secret) == pair.public == read_public(public)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    _, secret = make_keys(tmp_path, "ours")
    before = secret.read_bytes()
    with pytest.raises(KeyFileError, match="exists"):
        make_keys(tmp_path, "ours")
    assert secret.read_bytes() == before


def test_wrong_files_are_named(tmp_path: Path) -> None:
    public, _ = make_keys(tmp_path, "ours")
    with pytest.raises(KeyFileError, match="no secret key"):
        read_pair(public)
    with pytest.raises(KeyFileError, match="missing"):
        read_pair(tmp_path / "missing.key_secret")
    broken = tmp_path / "broken.key"
    broken.write_text('curve\n    public-key = "abc"\n')
    with pytest.raises(KeyFileError, match=r"broken\.key"):
        read_public(broken)


def test_clients_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that changes is read again, whatever is wrong in it."""
    ours = read_public(make_keys(tmp_path, "ours")[0])
    clients = Clients(tmp_path)
    assert clients.callback("", ours)
    assert not clients.callback("", b"")
    path, _ = make_keys(tmp_path, "new")
    new = read_public(path)
    assert clients.callback("", new)
    path.unlink()
    assert [clients.callback("", key) for key in (new, ours)] == [False, True]
    (tmp_path / "broken.key").write_text("no key")
    assert [clients.callback("", key) for key in (ours, b"")] == [True, False]
    assert "broken.key" in caplog.text
    num_logged = len(caplog.records)
    assert clients.callback("", ours)
    assert len(caplog.records) == num_logged
    renewed = read_public(make_keys(tmp_path / "other", "ours")[0])
    (tmp_path / "other" / "ours.key").replace(tmp_path / "ours.key")
    assert [clients.callback("", key) for key in (ours, renewed)] == [False, True]


def test_a_folder_of_clients_has_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no \*\.key files"):
        check_clients(tmp_path)
    make_keys(tmp_path, "ours")
    check_clients(tmp_path)
