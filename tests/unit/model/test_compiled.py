"""The compiled forward pass: one graph for all numbers of tokens, equal to the decoder's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.drivers.paged_rows import make_batch
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.reference import ReferenceAttention
from toka_async.checkpoint.spec import read_spec
from toka_async.model.compiled import CompiledForward, OpAttention, num_compiles
from toka_async.model.decoder import Decoder
from toka_async.model.weights import build_decoder, load_weights

PAGE_SIZE = 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model:
    """A decoder and its attention, run eagerly or through `forward`."""

    def __init__(self, folder: Path, family: str, compiler: str) -> None:
        spec = read_spec(make_checkpoint(folder, family, num_hidden_layers=2))
        self.decoder: Decoder = build_decoder(spec, torch.float32, CPU)
        load_weights(self.decoder, folder, progress=False)
        cache = KVCache(2, 20, spec.num_kv_heads, PAGE_SIZE, spec.head_dim, torch.float32, CPU)
        self.attention = ReferenceAttention(cache, spec.num_heads, spec.windows)
        self.forward = CompiledForward(self.decoder, self.attention, compiler)

    @torch.inference_mode()
    def both(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Hidden states of a prompt, compiled and eager."""
        with torch.inference_mode(num_tokens % 3 > 0):
            token_ids, positions = torch.arange(num_tokens) + 5, torch.arange(num_tokens)
        pages = list(range(-(-num_tokens // PAGE_SIZE)))
        self.attention.plan(make_batch([(pages, num_tokens, num_tokens)], 0, PAGE_SIZE))
        compiled = self.forward(token_ids, positions)
        return compiled, self.decoder(token_ids, positions, self.attention)


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # without and with norms of queries and keys
def test_one_graph_for_all_sizes(tmp_path: Path, family: str) -> None:
    model = Model(tmp_path, family, "eager")
    before = num_compiles()
    for num_tokens in (7, 2, 16, 33, 64, 5):
        torch.testing.assert_close(*model.both(num_tokens))
    assert num_compiles() == before + 1
    assert model.forward.num_eager == 0


def test_a_single_token_has_a_graph_of_its_own(tmp_path: Path) -> None:
    model = Model(tmp_path, "llama", "eager")
    before = num_compiles()
    for num_tokens in (1, 8, 1, 9):
        torch.testing.assert_close(*model.both(num_tokens))
    assert num_compiles() == before + 2
    assert model.forward.num_eager == 0


def test_after_the_freeze_nothing_is_compiled(tmp_path: Path) -> None:
    model = Model(tmp_path, "llama", "eager")
    model.both(8)
    model.forward.freeze()
    before = num_compiles()
    torch.testing.assert_close(*model.both(9))
    assert model.forward.num_eager == 0
    torch.testing.assert_close(*model.both(1))
    assert model.forward.num_eager == 1
    assert num_compiles() == before


def test_models_of_one_process_do_not_share_graphs(tmp_path: Path) -> None:
    models = [Model(tmp_path / family, family, "eager") for family in ("llama", "llama", "qwen3")]
    for num_tokens, model in zip((7, 6, 5, 4, 3, 2), 2 * models, strict=True):
        torch.testing.assert_close(*model.both(num_tokens))


def test_each_backend_has_an_operator_of_its_own(tmp_path: Path) -> None:
    model = Model(tmp_path, "llama", "eager")
    ops = [OpAttention(model.attention, model.decoder.num_heads) for _ in range(2)]
    assert len({op.name for op in ops}) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")  # of the compiler's own code
def test_inductor(tmp_path: Path) -> None:
    model = Model(tmp_path, "qwen3", "inductor")
    before = num_compiles()
    for num_tokens in (7, 20, 64):
        torch.testing.assert_close(*model.both(num_tokens), atol=1e-5, rtol=1e-5)
    assert num_compiles() == before + 1
