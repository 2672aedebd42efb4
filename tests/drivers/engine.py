"""The engine in one process for parity tests: the real core and runner, without sockets. Knows token ids only.

On a GPU it captures few graphs, so that it starts in a second or so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from tests.drivers.core import CoreDriver, CoreOptions, Received
from tests.drivers.page_rank import submit
from toka_async.checkpoint.spec import read_spec
from toka_async.config import (
    AttentionConfig,
    CacheConfig,
    Config,
    GraphsConfig,
    ModelConfig,
    ScheduleConfig,
    TuningConfig,
)
from toka_async.grammars.vocabulary import GrammarVocabulary
from toka_async.messages import TokenSampling
from toka_async.startup.runner_factory import RunnerFactory
from toka_async.transformers.describe import describe

GREEDY = TokenSampling(temperature=0.0)


class Engine:
    """A model behind the scheduler; requests run when `run` is called. max_graph_seqs: 0: nothing is captured."""

    def __init__(
        self,
        model_dir: Path,
        *,
        page_size: int = 16,
        num_tokens: int = 8192,
        max_seqs: int = 16,
        max_tokens: int = 64,
        until_full: bool = False,
        device: str = "cpu",
        dtype: str = "float32",
        backend: str = "auto",
        max_graph_seqs: int = 16,
        tuning_dir: str = "",
        batch_invariant: bool = False,
        quantize: str = "none",
        impl: str = "native",
        cache_dtype: str = "auto",
        vocabulary: GrammarVocabulary | None = None,
        **options: Unpack[CoreOptions],
    ) -> None:
        min_seqs = options.get("group_min_seqs", 0)
        config = Config(
            model=ModelConfig(
                path=str(model_dir),
                device=device,  # type: ignore[arg-type]
                dtype=dtype,  # type: ignore[arg-type]
                batch_invariant=batch_invariant,
                quantize=quantize,  # type: ignore[arg-type]
                impl=impl,  # type: ignore[arg-type]
            ),
            cache=CacheConfig(
                page_size=page_size,
                num_tokens=num_tokens,
                dtype=cache_dtype,  # type: ignore[arg-type]
            ),
            schedule=ScheduleConfig(max_seqs=max_seqs, max_tokens=max_tokens, group_min_seqs=min_seqs),
            attention=AttentionConfig(backend=backend),  # type: ignore[arg-type]
            graphs=GraphsConfig(enabled=max_graph_seqs > 0, max_rows=max(1, max_graph_seqs)),
            tuning=TuningConfig(dir=tuning_dir),
        )
        spec = read_spec(model_dir, quantize) if impl == "native" else describe(model_dir, trust_remote_code=False)
        factory = RunnerFactory(model_dir, spec, config, vocabulary=vocabulary)
        self.runner = rank = factory.build()
        self.control = factory.make_control(rank, 0, 0)
        self.driver = CoreDriver(rank.ready, max_tokens=max_tokens, rank=rank, until_full=until_full, **options)
        self.driver.carry_out = lambda control: self.control.launch(control)()

    def run(self, prompts: Sequence[Sequence[int]], **fields: object) -> list[Received]:
        """Submit all prompts together and run them to their ends."""
        first = len(self.driver.received)
        values = {"sampling": GREEDY, "max_tokens": 64} | fields
        received = [self.driver.submit(submit(first + i, list(p), **values)) for i, p in enumerate(prompts)]
        self.driver.drain()
        assert all(r.failed is None for r in received), [r.failed for r in received]
        return received
