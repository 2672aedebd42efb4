from __future__ import annotations

import pytest

from toka_async.nodes.interfaces import (
    NetworkError,
    find_address,
    find_interface,
    find_own_address,
    list_addresses,
    resolve_host,
)


def test_the_loopback_interface_is_found_both_ways() -> None:
    assert find_address("lo") == "127.0.0.1"
    assert find_interface("127.0.0.1") == find_interface("127.0.0.53") == "lo"


def test_every_address_has_its_interface() -> None:
    for name, address in list_addresses():
        if not address.startswith("fe80:"):  # may be on several
            assert find_interface(address) == name


def test_a_route_has_an_address_of_this_machine() -> None:
    assert find_own_address("127.0.0.1", 80) == "127.0.0.1"


def test_names_are_resolved() -> None:
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    with pytest.raises(NetworkError, match="cannot resolve 'no such name'"):
        resolve_host("no such name")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(
        NetworkError, match=r"'ib7' is no network interface with an address; this machine has .*lo \(127"
    ):
        find_address("ib7")
    with pytest.raises(NetworkError, match=r"203\.0\.113\.9 is not an address of this machine"):
        find_interface("203.0.113.9")
