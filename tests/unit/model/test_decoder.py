"""Splitting a decoder over ranks changes nothing; what it computes is checked against transformers in tests/parity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.models import heads, make_checkpoint
from tests.drivers.thread_ranks import run_ranks
from tests.fakes.mean_attention import TOKENS, in_shards, load, run
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.decoder import Decoder
from toka_async.model.layers import VocabularyMatrix
from toka_async.model.matrices.ops import TorchOps

ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("qwen2", 2), ("qwen3", 3), ("mistral", 3)], ids=str)
def test_ranks_together_equal_one(tmp_path: Path, family: str, size: int) -> None:
    folder = make_checkpoint(
        tmp_path,
        family,
        num_key_value_heads=size,
        attention_bias=family in ("llama", "qwen3"),
        mlp_bias=family == "llama",
    )
    alone = run(load(folder, LocalComm()), num_kv_heads=size)
    assert alone.shape == (TOKENS, 261)
    for logits in run_ranks(size, lambda comm: run(load(folder, comm))):
        torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "size", "ep", "min_tokens"),
    [
        ("qwen3_moe", 2, 1, 0),
        ("qwen3_moe", 2, 2, 0),
        ("qwen3_moe", 2, 2, 1),
        ("mixtral", 4, 1, 0),
        ("mixtral", 4, 2, 0),
        ("mixtral", 4, 2, 1),
        ("mixtral", 4, 4, 0),
        ("gpt_oss", 2, 1, 0),
        ("gpt_oss", 4, 2, 1),
    ],
)
def test_ranks_divide_experts(tmp_path: Path, family: str, size: int, ep: int, min_tokens: int) -> None:
    """By their units, by their number, and both. min_tokens: steps from so many tokens on are in shards; 0: none."""
    hidden_size = 64 if family == "gpt_oss" else 48
    fields = heads(8, 4, hidden_size, head_dim=8) | ({"mlp_only_layers": [0]} if family == "qwen3_moe" else {})
    folder = make_checkpoint(tmp_path, family, **fields)
    alone = run(load(folder, LocalComm()), num_kv_heads=4)

    def run_rank(comm: Comm) -> Tensor:
        layouts = in_shards(comm, min_tokens) if min_tokens else None
        return run(load(folder, comm, layouts, ep), num_kv_heads=4 // size)

    for logits in run_ranks(size, run_rank):
        torch.testing.assert_close(logits, alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "fields", "computed"),
    [
        ("llama", {}, [0, 1, 7]),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 4}, [0, 1, 2, 7]),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}, [0, 1, 2, 3, 7]),
    ],
    ids=str,
)
def test_a_rehearsal_computes_each_kind_of_layer(
    tmp_path: Path, family: str, fields: dict[str, Any], computed: list[int]
) -> None:
    sizes = {"num_hidden_layers": 8, "num_key_value_heads": 1}
    decoder = load(make_checkpoint(tmp_path, family, **sizes, **fields), LocalComm())
    calls = note_layers(decoder)
    usual = run(decoder)
    assert calls == [*range(8)]
    with decoder.rehearse():
        calls.clear()
        assert run(decoder).shape == usual.shape
    assert calls == computed
    assert torch.equal(run(decoder), usual)


def test_a_rehearsal_computes_layers_of_another_type(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path, "llama", num_hidden_layers=6, num_key_value_heads=1), LocalComm())
    decoder.list_layers()[3].to(torch.float32)
    calls = note_layers(decoder)
    with pytest.raises(RuntimeError, match="dtype"), decoder.rehearse():  # of products of two types
        run(decoder)
    assert calls == [0, 1, 2, 3]
    decoder.list_layers()[3].to(torch.float64)
    calls.clear()
    run(decoder)
    assert calls == [*range(6)], "a step that fails ends the rehearsal"


def note_layers(decoder: Decoder) -> list[int]:
    """Returns a list that the numbers of layers are added to as they are computed."""
    numbers: list[int] = []

    def note(number: int, attend: Callable[..., Any], *args: Any) -> Any:
        numbers.append(number)
        return attend(*args)

    for number, layer in enumerate(decoder.list_layers()):
        layer.attend = partial(note, number, layer.attend)  # type: ignore[method-assign]
    return numbers


def test_alone_nothing_is_exchanged() -> None:
    x = torch.randn(3)
    assert LocalComm().all_reduce(x) is x
    assert LocalComm().all_gather(x, 0) is x
    assert LocalComm().all_to_all(x) is x
    assert LocalComm().reduce_scatter(x) is x


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_float32_logits_are_not_rounded_to_the_models_dtype(size: int, device: str) -> None:
    spec = MatrixSpec(names=("head",), outputs=(Units(90),), inputs=Units(64), split="outputs")
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(90, 64, generator=generator).bfloat16()
    hidden = torch.randn(6, 64, generator=generator).bfloat16().to(device)
    exact = hidden.double().cpu() @ weight.double().t()

    def score(comm: Comm) -> Tensor:
        head = VocabularyMatrix(spec, comm, TorchOps(), fp32=True).to(device, torch.bfloat16)
        head.weight.data.copy_(weight[head.share.indices])
        own = head.own_logits(hidden)
        rows = len(hidden) // size
        assert torch.equal(own, head.logits(hidden)[comm.rank * rows : (comm.rank + 1) * rows])
        return head.logits(hidden)

    for logits in run_ranks(size, score):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double().cpu(), exact, atol=1e-4, rtol=1e-5)
