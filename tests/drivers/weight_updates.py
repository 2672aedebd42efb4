"""A trainer's updates of an engine in this process: through shared memory or a folder, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.drivers.engine import Engine
from toka_async.control import (
    AnyAction,
    BeginUpdate,
    Checksum,
    CommitUpdate,
    ControlDone,
    Directory,
    LoadTensors,
    VerifyUpdate,
)
from toka_async.server.engine.control import add_parts
from toka_async.transfer.buckets import Bucket, ShmWriter
from toka_async.transfer.tensors import TensorInfo

BUCKET = 1 << 19
Named = Sequence[tuple[str, Tensor]]


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@contextmanager
def shared_bucket(num_bytes: int = BUCKET) -> Iterator[ShmWriter]:
    writer = ShmWriter(f"toka-test-{os.getpid()}-{os.urandom(4).hex()}", num_bytes)
    try:
        yield writer
    finally:
        writer.close()


def make_load(infos: Sequence[TensorInfo], bucket: Bucket) -> LoadTensors:
    return LoadTensors(
        names=tuple(info.name for info in infos),
        dtypes=tuple(str(info.dtype)[6:] for info in infos),
        shapes=tuple(info.shape for info in infos),
        source=bucket,
        seconds=60,
    )


class Trainer:
    """Updates an engine; every method returns what the rank says."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def act(self, action: AnyAction) -> ControlDone:
        driver = self.engine.driver
        number = driver.control(action)
        while number not in driver.done:
            driver.obey()
            if number not in driver.done:
                driver.complete()
        return driver.done[number]

    def load(self, tensors: Named) -> ControlDone:
        """In as many fillings of a bucket as it takes, up to the first that fails."""
        with shared_bucket() as writer:
            for infos, bucket in writer.fill(tensors):
                done = self.act(make_load(infos, bucket))
                if done.error:
                    break
        return done

    def read(self, folder: Path) -> ControlDone:
        return self.act(LoadTensors(source=Directory(path=str(folder)), seconds=60))

    def begin(self) -> None:
        assert self.act(BeginUpdate()).error == ""

    def finish(self, partial: bool = False) -> ControlDone:
        """Commits what is complete."""
        done = self.act(VerifyUpdate(partial=partial))
        return done if done.error else self.act(CommitUpdate(version="new"))

    def update(self, tensors: Named) -> None:
        self.begin()
        assert self.load(tensors).error == ""
        assert self.finish().error == ""

    def sums(self) -> dict[str, str]:
        return add_parts(self.act(Checksum()).sums)
