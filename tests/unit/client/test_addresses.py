from __future__ import annotations

from pathlib import Path

import pytest

from toka_async.client.addresses import AddressSource


async def test_an_address_and_a_list_are_fixed() -> None:
    one, many = AddressSource("tcp://a:1"), AddressSource(["tcp://a:1", "ipc://b", "tcp://a:1"])
    assert one.is_fixed
    assert many.is_fixed
    assert await one.find() == ["tcp://a:1"]
    assert await many.find() == ["tcp://a:1", "ipc://b"]


async def test_a_file_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    for source in (AddressSource(file), AddressSource(str(file))):
        assert not source.is_fixed
        file.write_text("# all\ntcp://a:1 # the first\n\n  tcp://b:1\n")
        assert await source.find() == ["tcp://a:1", "tcp://b:1"]
        file.write_text("")
        assert await source.find() == []
    file.unlink()
    with pytest.raises(FileNotFoundError):
        await source.find()


async def test_functions_are_called_anew() -> None:
    urls = ["tcp://a:1"]

    async def find() -> list[str]:
        return urls

    for source in (AddressSource(lambda: urls), AddressSource(find)):
        assert not source.is_fixed
        assert await source.find() == urls
    urls.append("tcp://b:1")
    assert await source.find() == urls


async def test_a_name_stands_for_all_of_its_addresses() -> None:
    source = AddressSource("dns://localhost:10211")
    assert not source.is_fixed
    found = await source.find()
    assert found
    assert set(found) <= {"tcp://127.0.0.1:10211", "tcp://[::1]:10211"}
    for wrong in ("dns://localhost", "dns://:5"):
        with pytest.raises(ValueError, match="NAME:PORT"):
            AddressSource(wrong)
