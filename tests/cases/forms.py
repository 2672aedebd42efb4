"""Forms of uploads that are almost right, as hypothesis makes them."""

from __future__ import annotations

from hypothesis import strategies as st

BOUNDARY = "b" * 20
NAMES = ["file", "purpose", "expires_after[anchor]", "expires_after[seconds]", "_charset_", "other", "\u00e9", ""]
CONTINUED = ["; filename*0*=a'b", "; filename*0*=a''b; filename*1=c", "; filename*1=a", "; name*0*=a'b"]  # RFC 2231
DISPOSITIONS = st.builds(
    lambda kind, name, more: f'{kind}; name="{name}"{more}'.encode(),
    st.sampled_from(["form-data", "attachment", "form-data; x", ""]),
    st.sampled_from(NAMES),
    st.sampled_from(
        ["", '; filename="f"', "; filename*=utf-8''%e2%82", "; filename*=no-such''x", "; name=x", ';"', *CONTINUED]
    ),
)
LINES = st.sampled_from(
    [
        b"Content-Type: text/plain",
        b"Content-Type: multipart/mixed",
        b"Content-Type: multipart/mixed; boundary=inner",
        b"Content-Transfer-Encoding: base64",
        b"Content-Transfer-Encoding: nonsense",
        b"Content-Encoding: gzip",
        b"Content-Length: -1",
        b"Content-Length: 5",
        b"no header",
        b": nothing",
        b"X: \x00\x0f\xff",
        b"X: " + b"x" * 9000,
        b"A: 1\r\n" * 200 + b"A: 1",
    ]
)
BODIES = st.binary(max_size=40) | st.sampled_from([b"batch", b"created_at", b"3600", b"\xff" * 5000, b"\r\n--"])
PART = st.builds(
    lambda disposition, lines, body: b"\r\n".join([b"Content-Disposition: " + disposition, *lines, b"", body]),
    DISPOSITIONS,
    st.lists(LINES, max_size=2),
    BODIES,
)
GOOD = (
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
    b'Content-Disposition: form-data; name="file"; filename="in"\r\n\r\n{}',
)
PARTS = st.lists(PART | st.sampled_from(GOOD), max_size=4) | st.just([*GOOD])
TYPES = st.sampled_from(["form-data"] * 9 + ["mixed"])
BOUNDARIES = st.sampled_from([*[BOUNDARY] * 4, "x" * 70, "x" * 71, "\u00e9", "", "a b", None])


def form(parts: list[bytes], boundary: str) -> bytes:
    """A form of these parts."""
    line = b"--" + boundary.encode()
    return b"".join(line + b"\r\n" + part + b"\r\n" for part in parts) + line + b"--\r\n"


ALMOST = st.builds(
    lambda parts, boundary, cut, place, byte: (mangled(form(parts, boundary or ""), cut, place, byte), boundary),
    PARTS,
    BOUNDARIES,
    st.integers(0, 60),
    st.integers(0, 2000),
    st.none() | st.binary(min_size=1, max_size=2),
)


def mangled(data: bytes, cut: int, place: int, byte: bytes | None) -> bytes:
    """With other bytes in one place, or without its end."""
    if byte is not None:
        place %= len(data)
        return data[:place] + byte + data[place + len(byte) :]
    return data[: len(data) - cut] if cut < 40 else data


FORMS = ALMOST | st.tuples(st.binary(max_size=100), BOUNDARIES)  # what is sent, and the boundary that the header tells


def content_type(boundary: str | None, kind: str) -> str:
    """The header."""
    return f"multipart/{kind}" + ("" if boundary is None else f'; boundary="{boundary}"')
