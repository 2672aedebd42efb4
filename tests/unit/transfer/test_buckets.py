from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.drivers.weight_updates import shared_bucket
from toka_async.control import ShmBucket
from toka_async.transfer.buckets import Filling, fill_in_turn
from toka_async.transfer.errors import TransferError
from toka_async.transfer.shared import open_shm, read_tensors

TENSORS = [("a", torch.arange(5, dtype=torch.float32)), ("b", torch.arange(7, dtype=torch.bfloat16).view(7, 1))]


def test_a_bucket_has_what_was_filled_in() -> None:
    with shared_bucket(64) as writer:
        ((infos, bucket),) = writer.fill(TENSORS)
        assert isinstance(bucket, ShmBucket)
        tensors = dict(read_tensors(open_shm(bucket), infos, bucket.offsets))
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS)
        tensors["a"].zero_()  # is not shared
        again = dict(read_tensors(open_shm(bucket), infos, bucket.offsets))
        assert torch.equal(again["a"], TENSORS[0][1])
    assert not (Path("/dev/shm") / writer.name).exists()


def test_tensors_are_divided_among_fillings() -> None:
    for num_bytes, names in ((32, [["a"], ["b"]]), (46, [["a", "b"]])):
        with shared_bucket(num_bytes) as writer:
            assert [[info.name for info in infos] for infos, _ in writer.fill(TENSORS)] == names
    with shared_bucket(16) as writer, pytest.raises(TransferError, match="a has 20 bytes, the bucket 16"):
        list(writer.fill(TENSORS))


def read(filling: Filling) -> dict[str, Tensor]:
    infos, bucket = filling
    assert isinstance(bucket, ShmBucket)
    return dict(read_tensors(open_shm(bucket), infos, bucket.offsets))


def test_a_bucket_stays_as_it_is_while_the_other_is_filled() -> None:
    tensors = [(name, torch.full((8,), float(i))) for i, name in enumerate("abcde")]
    found: dict[str, Tensor] = {}
    with shared_bucket(32) as first, shared_bucket(32) as second:
        fillings = fill_in_turn([first, second], tensors)
        before, _ = next(fillings)
        for filling, _ in fillings:
            found |= {name: tensor.clone() for name, tensor in read(before).items()}
            before = filling
        found |= {name: tensor.clone() for name, tensor in read(before).items()}
    assert list(found) == [*"abcde"]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors)


def test_a_tensor_is_copied_when_it_is_added() -> None:
    tensor = torch.ones(4)
    with shared_bucket(16) as writer:
        assert writer.add("a", tensor)
        tensor.zero_()
        assert not writer.add("b", tensor)
        infos, bucket = writer.take()
        assert isinstance(bucket, ShmBucket)
        ((_, found),) = read_tensors(open_shm(bucket), infos, bucket.offsets)
        assert torch.equal(found, torch.ones(4))
        assert writer.add("b", tensor)


def test_a_folder_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the signal that ends a process which writes where there is none."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with shared_bucket(64) as writer:
        assert writer.add("a", torch.ones(4))
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(TransferError, match=r"/dev/shm has no room for a bucket: No space left .* --shm-size"):
            writer.add("b", torch.ones(4))
        infos, _ = writer.take()
        assert [info.name for info in infos] == ["a"]
