"""Both ends of a broadcast in one thread: what one sends, the other receives."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from toka_async.transfer.deadline import Deadline
from toka_async.transfer.tensors import describe_tensor, divide_chunks
from toka_async.transfer.wire import receive_tensors, send_tensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "odd": torch.arange(3, dtype=torch.float32).to(torch.float8_e4m3fn),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
    "c": torch.arange(100, dtype=torch.float64),
}


class Line:
    """A group whose broadcasts wait in a line."""

    device = torch.device("cpu")

    def __init__(self, packed: bool, buffer_bytes: int) -> None:
        self.packed = packed
        self.buffer_bytes = buffer_bytes
        self.sent: deque[Tensor] = deque()
        self.receives = False

    def broadcast(self, tensor: Tensor, _deadline: Deadline) -> None:
        if self.receives:
            assert tensor.dtype == self.sent[0].dtype
            assert tensor.shape == self.sent[0].shape
            tensor.copy_(self.sent.popleft())
        else:
            self.sent.append(tensor.clone())

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("packed", "buffer_bytes", "num_sent"), [(False, 0, 6), (True, 1, 5), (True, 30, 2)])
def test_tensors_arrive_as_they_are(packed: bool, buffer_bytes: int, num_sent: int) -> None:
    line, deadline = Line(packed, buffer_bytes), Deadline(60)
    send_tensors(line, TENSORS.items(), deadline)
    assert len(line.sent) == num_sent
    line.receives = True
    infos = [describe_tensor(*each) for each in TENSORS.items()]
    received = {name: tensor.clone() for name, tensor in receive_tensors(line, infos, deadline)}
    assert list(received) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name].float(), tensor.float())


def test_a_chunk_ends_with_the_tensor_that_exceeds_the_buffer() -> None:
    infos = [describe_tensor(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate((4, 6, 1, 12, 3))]
    chunks = [[info.num_bytes for info in chunk] for chunk in divide_chunks(infos, 10)]
    assert chunks == [[4, 6, 1], [12], [3]]
