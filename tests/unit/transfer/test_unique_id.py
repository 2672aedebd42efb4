from __future__ import annotations

import pickle

import pytest

from toka_async.transfer.errors import TransferError
from toka_async.transfer.unique_id import read_unique_id, write_unique_id

ID = bytes(range(128))
# What `pickle.dumps` makes of vLLM's structure.
OF_VLLM = (
    b"\x80\x04\x95\xec\x00\x00\x00\x00\x00\x00\x00\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93\x94"
    b"\x8c4vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94}\x94C\x80"
    + ID
    + b"\x94\x86\x94\x86\x94R\x94."
)


def test_an_id_is_read_as_it_was_written() -> None:
    assert read_unique_id(write_unique_id(ID)) == ID
    assert read_unique_id(OF_VLLM) == ID


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps(ID[:-1]),
        pickle.dumps({"a": 1}),
        b"",
        b"\x80\x04",
        write_unique_id(ID)[:-40],
        write_unique_id(ID).replace(b"ncclUniqueId", b"ncclUniqueIe"),
        write_unique_id(ID).replace(b"c_ctypes\n_unpickle", b"cbuiltins\neval"),
        b"\x80\x03" + b"N" * 5000 + b".",
    ],
)
def test_anything_else_is_refused(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TransferError, match="ncclUniqueId cannot be read"):
        read_unique_id(data)
    assert capsys.readouterr().out == ""
