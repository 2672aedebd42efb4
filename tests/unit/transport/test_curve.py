"""Key files."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from toka_async.transport.curve import KeyFileError, check_clients, make_keys, read_pair, read_public


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


def test_a_folder_of_clients_has_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no \*\.key files"):
        check_clients(tmp_path)
    make_keys(tmp_path, "ours")
    check_clients(tmp_path)
