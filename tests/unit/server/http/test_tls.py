from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.processes.certificates import make_certificate
from toka_async.config import ConfigError, ServerConfig
from toka_async.server.http.tls import tls_context


def config(certificate: object = "", key: object = "") -> ServerConfig:
    return ServerConfig(tls_cert=str(certificate), tls_key=str(key))


def test_none() -> None:
    assert tls_context(ServerConfig()) is None


def test_a_certificate_and_its_key(tmp_path: Path) -> None:
    context = tls_context(config(*make_certificate(tmp_path)))
    assert context is not None
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        (ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_2),
        (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3),
    ],
)
def test_the_least_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: ssl.TLSVersion, expected: ssl.TLSVersion
) -> None:
    """Whatever Python and the system begin with."""
    given = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    given.minimum_version = default
    monkeypatch.setattr(ssl, "create_default_context", lambda _: given)
    context = tls_context(config(*make_certificate(tmp_path)))
    assert context is not None
    assert context.minimum_version == expected


def test_wrong_files(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", passphrase="secret words")
    junk = tmp_path / "junk"
    junk.write_bytes(b"\xff\x00")
    for given, message in (
        (config(certificate), r"^server\.tls_key: server\.tls_cert needs it"),
        (config(key=key), r"^server\.tls_cert: server\.tls_key needs it"),
        (config(tmp_path / "none", key), r"^server\.tls_cert: .*No such file"),
        (config(certificate, tmp_path), r"^server\.tls_key: .*directory"),
        (config(junk, key), r"^server\.tls_cert: .*no certificate"),
        (config(key, key), r"^server\.tls_cert: .*no certificate"),
        (config(certificate, junk), r"^server\.tls_key: .*no private key"),
        (config(certificate, certificate), r"^server\.tls_key: .*no private key"),
        (config(certificate, other), r"^server\.tls_key: .*not the key of"),
        (config(certificate, locked), r"^server\.tls_key: .*without a passphrase"),
    ):
        with pytest.raises(ConfigError, match=message):
            tls_context(given)
