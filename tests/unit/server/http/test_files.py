from __future__ import annotations

import errno
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, checked_error, web_server
from toka_async.batches.disk import StorageError
from toka_async.batches.records import FileRecord
from toka_async.batches.reserve import SIZE
from toka_async.server.http.files import BATCHES

LINE = b'{"custom_id": "a"}\n'

CHARSET = b'--x\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\nVALUE\r\n--x--'  # RFC 7578, 4.6


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[WebServer]:
    async with web_server(data_dir=str(tmp_path), max_file_mb=2, max_body_mb=1) as running:
        yield running


def form(data: bytes = LINE, purpose: str | None = "batch", name: str = "in.jsonl", **fields: str) -> aiohttp.FormData:
    """Fields `anchor` and `seconds` are those of expires_after."""
    made = aiohttp.FormData(quote_fields=False)
    if purpose is not None:
        made.add_field("purpose", purpose)
    for field, value in fields.items():
        made.add_field(f"expires_after[{field}]" if field in ("anchor", "seconds") else field, value)
    made.add_field("file", io.BytesIO(data), filename=name)
    return made


async def upload(server: WebServer, sent: Any, status: int = 200, **headers: str) -> dict[str, Any]:
    async with server.http.post(server.url + "/v1/files", data=sent, headers=headers) as response:
        answer = await response.json()
        assert response.status == status, answer
        return checked_error(answer) if status != 200 else answer


async def content(server: WebServer, file_id: str) -> bytes:
    async with server.http.get(f"{server.url}/v1/files/{file_id}/content") as response:
        assert response.status == 200
        return await response.read()


OF_X = "multipart/form-data; boundary=x"
FORM = {"Content-Type": OF_X}


async def half_form(data: bytes) -> AsyncIterator[bytes]:
    """The start of a form of unknown length, up to the end of its file."""
    yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n' + data + b"\r\n--x"


def names(tmp_path: Path, folder: str) -> list[str]:
    return [each.name for each in (tmp_path / folder).iterdir()]


async def test_what_is_uploaded_can_be_had_again(server: WebServer, tmp_path: Path) -> None:
    data = bytes(range(256)) * 6000  # more than one piece, and more than max_body_mb
    before = int(time.time())
    made = await upload(server, form(data, name="späte größe.jsonl"))
    assert made["object"] == "file"
    assert (made["bytes"], made["filename"], made["purpose"]) == (len(data), "späte größe.jsonl", "batch")
    assert made["expires_at"] is None
    assert before <= made["created_at"] <= time.time()
    assert await server.get(f"/v1/files/{made['id']}") == (200, made)
    assert await content(server, made["id"]) == data
    assert names(tmp_path, "files") == [made["id"]]
    assert not names(tmp_path, "uploads")


async def test_a_deleted_file_is_gone(server: WebServer, tmp_path: Path) -> None:
    made = await upload(server, form())
    async with server.http.delete(f"{server.url}/v1/files/{made['id']}") as response:
        assert await response.json() == {"id": made["id"], "object": "file", "deleted": True}
    for path in ("", "/content"):
        status, answer = await server.get(f"/v1/files/{made['id']}{path}")
        assert status == 404
        assert made["id"] in checked_error(answer)["message"]
    async with server.http.delete(f"{server.url}/v1/files/{made['id']}") as response:
        assert response.status == 404
    assert not names(tmp_path, "files")


async def test_pages(server: WebServer) -> None:
    ids = [(await upload(server, form()))["id"] for _ in range(5)]
    _, newest = await server.get("/v1/files?limit=2")
    assert [each["id"] for each in newest["data"]] == ids[:2:-1]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[4], ids[3], True)
    _, rest = await server.get(f"/v1/files?after={ids[3]}")
    assert [each["id"] for each in rest["data"]] == ids[2::-1]
    assert rest["has_more"] is False
    _, oldest = await server.get(f"/v1/files?order=asc&after={ids[0]}&limit=2&purpose=batch")
    assert [each["id"] for each in oldest["data"]] == ids[1:3]
    _, others = await server.get("/v1/files?purpose=batch_output")
    assert (others["data"], others["first_id"], others["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        *((f"limit={wrong}", 400, "limit") for wrong in ("0", "10001", "-1", "000000000001" + "9" * 30, "%D9%A3", "")),
        ("limit=1&limit=2", 400, "limit"),
        ("order=up", 400, "order"),
        ("color=red", 400, "color"),
        ("after=file-nope", 404, "id"),
    ],
)
async def test_wrong_lists(server: WebServer, query: str, status: int, param: str) -> None:
    got, answer = await server.get(f"/v1/files?{query}")
    assert got == status
    assert checked_error(answer)["param"] == param


async def test_an_owners_files_are_limited(tmp_path: Path) -> None:
    """Before any of an upload is read, where it says how long it is; while it comes, where it does not."""
    async with web_server(data_dir=str(tmp_path), key_max_files=2, key_max_files_mb=1) as server:
        half = bytes(600 << 10)
        made = await upload(server, form(half))
        refused = await upload(server, form(half), 429)
        assert refused["code"] == "insufficient_quota"
        assert "batches.key_max_files_mb" in refused["message"]
        assert (await upload(server, half_form(half), 429, **FORM))["code"] == "insufficient_quota"
        service = server.app[BATCHES]
        assert service is not None
        assert not service.receiving.total()
        assert not names(tmp_path, "uploads")
        await upload(server, form())
        assert "batches.key_max_files)" in (await upload(server, form(), 429))["message"]
        async with server.http.delete(f"{server.url}/v1/files/{made['id']}") as response:
            assert response.status == 200
        await upload(server, form(half))


@pytest.mark.parametrize("name", ["..%2F..%2Fetc%2Fpasswd", "..", "lock", "batches.sqlite", "%00", "a" * 3000])
async def test_no_name_of_a_request_is_a_path(server: WebServer, name: str) -> None:
    async with server.http.get(f"{server.url}/v1/files/{name}/content") as response:
        assert response.status == 404
        checked_error(await response.json())


async def test_an_expired_file_is_gone(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await upload(server, form(anchor="created_at", seconds="3600"))
    assert made["expires_at"] == made["created_at"] + 3600
    service = server.app[BATCHES]
    assert service is not None
    monkeypatch.setattr(service.store, "now", lambda: made["expires_at"])
    assert (await server.get(f"/v1/files/{made['id']}"))[0] == 404
    assert (await server.get("/v1/files"))[1]["data"] == []
    other = await upload(server, form())
    assert names(tmp_path, "files") == [other["id"]]


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (form(purpose=None), "purpose"),
        (form(purpose="fine-tune"), "purpose"),
        (form(color="red"), "color"),
        (form(seconds="3600"), "expires_after"),
        (form(anchor="created_at", seconds="5"), "expires_after"),
        (form(color="x" * 5000), "color"),
    ],
)
async def test_wrong_forms(server: WebServer, tmp_path: Path, sent: aiohttp.FormData, param: str) -> None:
    error = await upload(server, sent, 400)
    assert error["param"] == param
    assert not names(tmp_path, "files")
    assert not names(tmp_path, "uploads")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data"),
        (b"nonsense", OF_X),
        (b"--x\r\n\r\nhello\r\n--x--\r\n", OF_X),
        (b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--', OF_X),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n'
            b"Content-Transfer-Encoding: base64\r\n\r\nYQ==\r\n--x--",
            OF_X,
        ),
        (b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\n\r\n--y--\r\n--x--", OF_X),
        (b'--x\r\nContent-Disposition: form-data; name="\x0f"\r\n\r\n\r\n--x--', OF_X),
        (b"--x\r\nContent-Disposition: form-data; name*0*=a'b\r\n\r\n\r\n--x--", OF_X),
        (b'--x\r\nContent-Disposition: form-data; name="file"; filename*0*=a\'b\r\n\r\n\r\n--x--', OF_X),
        (b"--x\r\nX: " + b"y" * 9000 + b"\r\n\r\n\r\n--x--", OF_X),
        (b"--x\r\n" + b"X: y\r\n" * 200 + b"\r\n\r\n--x--", OF_X),
        (CHARSET.replace(b"VALUE", b"y" * 40), OF_X),
        (CHARSET.replace(b"--x", b"--" + b"x" * 60), "multipart/form-data; boundary=" + "x" * 60),
    ],
)
async def test_what_is_no_form(server: WebServer, body: bytes, kind: str) -> None:
    error = await upload(server, body, 400, **{"Content-Type": kind})
    assert len(error["message"]) < 400


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/mixed; boundary=x"])
async def test_a_body_of_another_type(server: WebServer, kind: str) -> None:
    error = await upload(server, b"{}", 415, **{"Content-Type": kind})
    assert "multipart/form-data" in error["message"]


async def test_a_field_that_is_given_twice(server: WebServer) -> None:
    sent = form()
    sent.add_field("purpose", "batch")
    assert (await upload(server, sent, 400))["param"] == "purpose"


async def test_a_file_that_is_deleted_while_it_is_asked_for(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made, service = await upload(server, form()), server.app[BATCHES]
    assert service is not None
    find = service.store.file

    def found_and_deleted(file_id: str, viewer: str | None) -> FileRecord:
        record = find(file_id, viewer)
        monkeypatch.undo()
        service.store.remove_file(file_id)
        return record

    monkeypatch.setattr(service.store, "file", found_and_deleted)
    status, answer = await server.get(f"/v1/files/{made['id']}/content")
    assert status == 404
    assert checked_error(answer)["code"] == "not_found"


async def test_two_files(server: WebServer, tmp_path: Path) -> None:
    sent = form()
    sent.add_field("file", io.BytesIO(b"more"), filename="b")
    assert (await upload(server, sent, 400))["param"] == "file"
    assert not names(tmp_path, "uploads")


@pytest.mark.parametrize("says", [True, False])
async def test_a_file_that_is_too_large(server: WebServer, tmp_path: Path, says: bool) -> None:
    """Whether its length was told before, or only becomes known."""
    body = form(b"x" * (3 << 20))()
    async with aiohttp.ClientSession() as http:

        async def pieces() -> AsyncIterator[bytes]:
            data = await body.as_bytes()
            for start in range(0, len(data), 1 << 16):
                yield data[start : start + 1 << 16]

        sent: Any = body if says else pieces()
        headers = {"Content-Type": body.headers["Content-Type"]}
        try:
            async with http.post(server.url + "/v1/files", data=sent, headers=headers) as response:
                assert response.status == 413
                assert "max_file_mb" in checked_error(await response.json())["message"]
        except aiohttp.ClientConnectionError:  # it was closed while the client still sent
            pass
    assert not names(tmp_path, "files")
    assert not names(tmp_path, "uploads")


async def test_a_client_that_leaves_in_the_middle(server: WebServer, tmp_path: Path) -> None:
    begun = form(b"x" * 200_000)()
    data = await begun.as_bytes()

    async def half() -> AsyncIterator[bytes]:
        yield data[:150_000]
        raise RuntimeError("the client is gone")

    async with aiohttp.ClientSession() as http:
        with pytest.raises((RuntimeError, aiohttp.ClientError)):
            await http.post(
                server.url + "/v1/files", data=half(), headers={"Content-Type": begun.headers["Content-Type"]}
            )
    await until(lambda: not names(tmp_path, "uploads"))


async def test_a_full_disk(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.app[BATCHES]
    assert service is not None

    def full(_step: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(service.store._disk, "before", full)
    error = await upload(server, form(), 507)
    assert (error["code"], error["type"]) == ("disk_full", "server_error")
    assert not names(tmp_path, "files")
    assert not names(tmp_path, "uploads")
    monkeypatch.undo()
    await upload(server, form())


async def test_a_full_disk_lets_files_go(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a reserve for it: else nobody could make room."""
    service = server.app[BATCHES]
    assert service is not None
    made = await upload(server, form())
    database, reserve = service.store.database, tmp_path / "reserve"
    forget = database.remove_file

    def full(file_id: str) -> None:
        if reserve.stat().st_size:
            raise StorageError("the disk is full", full=True)
        forget(file_id)

    monkeypatch.setattr(database, "remove_file", full)
    async with server.http.delete(f"{server.url}/v1/files/{made['id']}") as response:
        assert response.status == 200, await response.text()
    assert not names(tmp_path, "files")
    assert reserve.stat().st_size == SIZE


async def test_without_a_folder_the_error_says_what_to_set() -> None:
    async with web_server() as server:
        assert "server.data_dir" in (await upload(server, form(), 404))["message"]
        for path in ("/v1/files", "/v1/files/x", "/v1/batches", "/v1/batches/x"):
            status, answer = await server.get(path)
            assert status == 404
            assert checked_error(answer)["code"] == "no_data_dir"
