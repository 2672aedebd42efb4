from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.drivers.weight_updates import shared_bucket
from toka_async.control import CudaBucket, ShmBucket
from toka_async.transfer.buckets import ShmWriter
from toka_async.transfer.errors import TransferError
from toka_async.transfer.shared import OpenBuckets, open_shm, read_tensors

TENSORS = [("a", torch.arange(5, dtype=torch.float32)), ("b", torch.arange(7, dtype=torch.bfloat16).view(7, 1))]


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
        ((infos, bucket),) = writer.fill(TENSORS)
        assert isinstance(bucket, ShmBucket)
        buffer = open_shm(bucket)
        for offsets in ((0,), (0, -16), (0, 64)):
            with pytest.raises(TransferError, match=r"offsets|are not in 64 bytes"):
                list(read_tensors(buffer, infos, offsets))


def test_a_bucket_of_a_gpu_needs_one() -> None:
    with pytest.raises(TransferError, match="needs ranks on GPUs"):
        OpenBuckets(torch.device("cpu")).open(CudaBucket(handles=(), offsets=()))


def test_a_bucket_is_mapped_once_until_it_is_closed() -> None:
    buckets = OpenBuckets(torch.device("cpu"))
    with shared_bucket(64) as writer:
        for value in (1.0, 2.0):
            ((infos, bucket),) = writer.fill([("a", torch.full((4,), value))])
            assert isinstance(bucket, ShmBucket)
            opened = buckets.open(bucket)
            ((_, found),) = read_tensors(opened, infos, bucket.offsets)
            assert torch.equal(found, torch.full((4,), value))
        assert buckets.open(bucket) is opened
        buckets.close()
        assert buckets.open(bucket) is not opened


def test_a_new_file_of_the_same_name_is_another_bucket(tmp_path: Path) -> None:
    buckets, name = OpenBuckets(torch.device("cpu")), f"toka-test-{tmp_path.parent.name}-{tmp_path.name}"
    for value in (1.0, 2.0):
        writer = ShmWriter(name, 64)
        ((infos, bucket),) = writer.fill([("a", torch.full((4,), value))])
        assert isinstance(bucket, ShmBucket)
        ((_, found),) = read_tensors(buckets.open(bucket), infos, bucket.offsets)
        assert torch.equal(found, torch.full((4,), value))
        writer.close()
