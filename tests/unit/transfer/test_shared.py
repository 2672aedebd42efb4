from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.drivers.weight_updates import shared_bucket
from toka_async.control import CudaBucket, ShmBucket
from toka_async.transfer.errors import TransferError
from toka_async.transfer.shared import divide_buckets, open_cuda, open_shm, read_tensors

TENSORS = [("a", torch.arange(5, dtype=torch.float32)), ("b", torch.arange(7, dtype=torch.bfloat16).view(7, 1))]


def test_a_bucket_has_what_was_filled_in() -> None:
    with shared_bucket(64) as writer:
        infos, bucket = writer.fill(TENSORS)
        tensors = dict(read_tensors(open_shm(bucket), infos, bucket.offsets))
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS)
        tensors["a"].zero_()  # is not shared
        again = dict(read_tensors(open_shm(bucket), infos, bucket.offsets))
        assert torch.equal(again["a"], TENSORS[0][1])
    assert not (Path("/dev/shm") / writer.name).exists()


def test_tensors_are_divided_among_fillings() -> None:
    assert [[name for name, _ in part] for part in divide_buckets(TENSORS, 32)] == [["a"], ["b"]]
    assert [[name for name, _ in part] for part in divide_buckets(TENSORS, 48)] == [["a", "b"]]
    with pytest.raises(TransferError, match="a has 20 bytes, the bucket 16"):
        list(divide_buckets(TENSORS, 16))


@pytest.mark.parametrize("name", ["", "..", "/../etc/passwd", "a/b", "toka-test-none"])
def test_only_names_of_shared_memory_are_opened(name: str) -> None:
    with pytest.raises(TransferError, match=r"is no name|cannot be read"):
        open_shm(ShmBucket(name=name, offsets=()))


def test_links_are_not_followed(tmp_path: Path) -> None:
    link = Path("/dev/shm") / f"toka-test-{tmp_path.name}"
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(TransferError, match="cannot be read"):
            open_shm(ShmBucket(name=link.name, offsets=()))
    finally:
        link.unlink()


def test_offsets_must_fit() -> None:
    with shared_bucket(64) as writer:
        infos, bucket = writer.fill(TENSORS)
        buffer = open_shm(bucket)
        for offsets in ((0,), (0, -16), (0, 64)):
            with pytest.raises(TransferError, match=r"offsets|are not in 64 bytes"):
                list(read_tensors(buffer, infos, offsets))


def test_a_bucket_of_a_gpu_needs_one() -> None:
    with pytest.raises(TransferError, match="needs ranks on GPUs"):
        open_cuda(CudaBucket(handles=(), offsets=()), torch.device("cpu"))
