"""Compiles kernels in threads while something else takes the time, as loading weights does.

A kernel is compiled when it first runs. Triton releases Python's lock in most of its compiler, and so do copies of
weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from toka_async.attention.build import LARGEST_HEAD, Backend, list_triton_trials
from toka_async.attention.kv_cache import CacheFormat, KVCache
from toka_async.checkpoint.spec import ModelSpec
from toka_async.startup.device import has_kernels

_NUM_PAGES = 64  # of the cache that is tried
_MOST_THREADS = 8  # more wait for Python's lock

logger = logging.getLogger(__name__)

Task = Callable[[], None]


def list_compile_tasks(
    spec: ModelSpec, dtype: torch.dtype, stored: torch.dtype, device: torch.device, backend: Backend, page_size: int
) -> list[Task]:
    """Lists functions that compile the kernels of a model, or of a rank's part of it, the longest first.

    The kernels are those of attention, sampling and layers, but not of products.

    spec: of the rank. Without a vocabulary the rank does not sample whole logits. stored: what the cache stores.
    """
    if not has_kernels(device):
        return []
    tasks: list[Task] = []
    for kind, layers in spec.attention_kinds.items() if backend in ("auto", "triton") else ():
        if kind.head_dim <= LARGEST_HEAD:
            shape = 1, _NUM_PAGES, kind.num_kv_heads, page_size, kind.head_dim
            cache = KVCache(*shape, dtype, device, stored=CacheFormat(stored))
            windows = [spec.windows[layer] for layer in layers]
            tasks += list_triton_trials(cache, kind.num_heads, windows, kind.sinks, kind.soft_cap)
    if spec.vocab_size:
        from toka_async.runner.kernel_sampler import try_editing, try_sampling

        of_logits = torch.float32 if spec.fp32_logits else dtype
        tasks.append(partial(try_sampling, spec.vocab_size, of_logits, device))
        tasks.append(partial(try_editing, spec.vocab_size, page_size, of_logits, device))
    from toka_async.startup.layer_trials import list_layer_trials

    return tasks + list_layer_trials(spec, dtype, stored, device, page_size)


def count_compile_threads(num_sharing: int) -> int:
    """Counts the threads that a rank may compile in. num_sharing: ranks that share this machine's cores."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // num_sharing))


@contextmanager
def compile_ahead(tasks: Sequence[Task], device: torch.device, num_threads: int) -> Iterator[None]:
    """Runs tasks in threads while the body runs, and waits for them at its end.

    What fails there fails again where the kernel is used, which knows what to do.
    """

    def run(task: Task) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            task()
        except Exception as error:
            logger.debug("a kernel was not compiled ahead: %s", error)

    apart: AbstractContextManager[None] = nullcontext()
    if device.type == "cuda":
        from toka_async.kernels.launches.launchers import keep_launchers_apart

        apart = keep_launchers_apart()
    with apart, ThreadPoolExecutor(num_threads, thread_name_prefix="compiler") as pool:
        for task in tasks:
            pool.submit(run, task)
        yield
