"""Loads the certificate and key of HTTPS. Knows no HTTP."""

from __future__ import annotations

import ssl
from pathlib import Path

from toka_async.config import ConfigError, ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Allows TLS 1.2 or newer with `server.tls_cert` (and its chain) and `server.tls_key`; None without them.

    Raises ConfigError, which names the key, when one is missing or wrong.
    """
    if not config.tls_cert and not config.tls_key:
        return None
    for key, path, other in (("cert", config.tls_cert, "key"), ("key", config.tls_key, "cert")):
        if not path:
            raise ConfigError(f"server.tls_{key}: server.tls_{other} needs it too: a PEM file")
        _check_readable(f"server.tls_{key}", Path(path))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(config.tls_cert)
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"server.tls_cert: {config.tls_cert} is no certificate in PEM format") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Some distributions' Python has no least version by default; others may ask for a newer one.
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # never ask the terminal
    except (ssl.SSLError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"server.tls_key: {config.tls_key} is not the key of server.tls_cert") from None
        raise ConfigError(f"server.tls_key: {config.tls_key} is no private key in PEM without a passphrase") from None
    return context


def _check_readable(key: str, path: Path) -> None:
    try:
        path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {path}: {reason}") from None
