"""A start takes no more of the GPU than it may; its largest step fits beside cache and graphs; sleep frees memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.drivers.gpu_models import make_model
from toka_async.checkpoint.spec import read_spec
from toka_async.config import CacheConfig, Config, GraphsConfig, ModelConfig, ScheduleConfig, TuningConfig
from toka_async.memory.virtual import CudaDriver, VirtualMemory, view_memory
from toka_async.startup.cache_size import count_graph_bytes
from toka_async.startup.runner_factory import RunnerFactory
from toka_async.startup.warmup import make_largest_load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20
TOKENS = 1024
SLACK = 64 * MIB  # bytes: blocks of the allocator that are partly used, the library's workspace on another stream


def make_factory(folder: Path, cache: CacheConfig, max_rows: int) -> RunnerFactory:
    config = Config(
        model=ModelConfig(device="cuda"),
        cache=cache,
        schedule=ScheduleConfig(max_seqs=1024, max_tokens=8192),
        graphs=GraphsConfig(max_rows=max_rows, max_tokens=TOKENS),
        tuning=TuningConfig(dir=""),
    )
    return RunnerFactory(folder, read_spec(folder), config)


def count_pool_bytes() -> int:
    """Counts the memory of all graphs of this process, of engines of other tests as well."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(segment["total_size"] for segment in snapshot if tuple(segment["segment_pool_id"]) != (0, 0))


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_graphs_compute_in_what_is_counted_for_them(tmp_path: Path, shape: str) -> None:
    factory = make_factory(make_model(tmp_path, shape), CacheConfig(num_tokens=65_536), 512)
    before = count_pool_bytes()
    runner = factory.build()
    taken = count_pool_bytes() - before
    assert runner.decode is not None
    assert runner.decode.graphs is not None
    assert taken
    assert taken <= count_graph_bytes(factory.counted_spec, factory.dtype, 512, TOKENS) + SLACK


def test_the_largest_step_fits_beside_the_cache_and_the_graphs(tmp_path: Path) -> None:
    """Needs the GPU to itself: it looks at all memory that is in use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    fraction = 0.2 + (total - free) / total
    runner = make_factory(make_model(tmp_path, "llama"), CacheConfig(memory_fraction=fraction), 1024).build()
    for _ in range(2):
        make_largest_load(runner.ready)(runner)
        torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    assert total - free <= fraction * total


def test_memory_is_free_for_others_and_comes_back_at_its_addresses() -> None:
    """Needs the GPU to itself."""
    device = torch.device("cuda:0")
    memory = VirtualMemory(3000 * MIB, CudaDriver(device))
    view = view_memory(memory, device)
    assert view.data_ptr() == memory.address
    view.fill_(7)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(device)[0]
    memory.release()
    assert torch.cuda.mem_get_info(device)[0] - before >= 2900 * MIB
    memory.restore()
    view.fill_(9)
    assert int(view[:: 64 * MIB].sum()) == 9 * len(view[:: 64 * MIB])
    memory.release()
