from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.models import GEMMA4_SMALL, make_checkpoint
from toka_async import capacity as module
from toka_async import cli
from toka_async.attention.states.build import build_states
from toka_async.capacity import GIB, make_plan, plan_lines
from toka_async.checkpoint.cost import count_stage_bytes
from toka_async.checkpoint.division import make_rank_spec, make_stage_spec, stage_parts
from toka_async.checkpoint.limits import resolve_num_snapshots
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import Config, load_config
from toka_async.model.weights import build_decoder
from toka_async.startup.cache_size import compute_spare_bytes, count_graph_bytes


def configure(folder: Path, *overrides: str) -> Config:
    return load_config(None, [f"model.path={folder}", *overrides])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama", num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("gemma4_text", GEMMA4_SMALL),
    ],
)
def test_weights_are_those_of_the_model(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    spec = read_spec(make_checkpoint(tmp_path, family, **fields))
    decoder = build_decoder(spec, torch.bfloat16, torch.device("meta"))
    assert count_stage_bytes(spec, True, True, 2) == sum(parameter.nbytes for parameter in decoder.parameters())


LAYER_TYPES = ["sliding_attention", "full_attention"] * 12
GPT_OSS: dict[str, Any] = {  # of the shape of gpt-oss-20b
    "num_hidden_layers": 24, "layer_types": LAYER_TYPES, "sliding_window": 128, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_more_sequences_fit_where_layers_have_a_window(tmp_path: Path) -> None:
    """Half of the layers keep 128 tokens of a sequence. As many as all sequences need cost next to nothing."""
    windowed = make_checkpoint(tmp_path / "windowed", "gpt_oss", **GPT_OSS)
    full = make_checkpoint(tmp_path / "full", "gpt_oss", **(GPT_OSS | {"layer_types": LAYER_TYPES[1:2] * 24}))
    few = "schedule.max_seqs=256"
    plans = [make_plan(configure(folder, *more), 80 * GIB) for folder in (full, windowed) for more in ((), (few,))]
    num_tokens = [plan.num_tokens for plan in plans]
    assert 1.43 < num_tokens[2] / num_tokens[0] < 1.46
    assert 1.9 < num_tokens[3] / num_tokens[1] < 2
    assert [plan.num_window_tokens for plan in plans[:2]] == [0, 0]
    assert plans[2].num_window_tokens == num_tokens[2] // 16 * 3 // 8 * 16
    lines = "\n".join(plan_lines(plans[2]))
    assert f"{plans[2].num_window_tokens:,} of them in layers that see 128 tokens" in lines
    assert f"{num_tokens[2] // 512:,} of 512 tokens" in lines
    short = make_plan(configure(windowed, "model.max_context=128"), 80 * GIB)
    assert short.num_window_tokens == 0, "no sequence outgrows the window"


def test_gpus_are_counted_on_their_machine(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    config = configure(folder, "parallel.pp=2", "parallel.dp=2", "cluster.nodes=2", "cluster.address=tcp://a:1")
    plan = make_plan(config, 8 * GIB)
    assert [(rank.node, rank.gpu) for rank in plan.ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert "1 of node 1" in "\n".join(plan_lines(plan))


@pytest.mark.parametrize("tied", [False, True])
def test_parts_make_up_the_whole(tmp_path: Path, tied: bool) -> None:
    """But for the norms, which every rank has, and a tied embedding, which the last stage has again."""
    folder = make_checkpoint(
        tmp_path, "llama", num_hidden_layers=5, vocab_size=64, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    spec = read_spec(folder)
    whole = make_plan(configure(folder), 8 * GIB).ranks[0]
    parts = make_plan(configure(folder, "parallel.pp=2", "parallel.tp=2", "parallel.dp=3"), 8 * GIB).ranks
    assert [rank.gpu for rank in parts] == list(range(12))
    assert [rank.replica for rank in parts] == [0] * 4 + [1] * 4 + [2] * 4
    assert [(rank.stage, rank.tp_rank) for rank in parts[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.layers[1] for rank in parts[:4:2]] == [parts[2].layers[0], 5]
    norms = 4 * spec.hidden_size * (2 * spec.num_layers + 1)
    again = 4 * tied * spec.vocab_size * spec.hidden_size
    assert sum(rank.weights for rank in parts[:4]) == whole.weights + norms + again
    assert sum(rank.kv_token for rank in parts[:4]) == whole.kv_token


def test_the_cache_gets_what_is_left(model: Path) -> None:
    plan = make_plan(configure(model, "cache.memory_fraction=0.5", "schedule.max_seqs=8"), 8 * GIB)
    (rank,) = plan.ranks
    graphs = count_graph_bytes(plan.spec, plan.dtype, 8, 4096)
    left = 4 * GIB - compute_spare_bytes(8 * GIB) - rank.weights - rank.largest_step - graphs
    page_tokens, page_bytes = 16, 16 * (rank.kv_token + 4)
    assert rank.num_tokens == left // page_bytes * page_tokens == plan.num_tokens
    more = make_plan(configure(model, "cache.memory_fraction=0.5", "schedule.max_seqs=8"), 9 * GIB)
    assert more.num_tokens > plan.num_tokens


def test_states_are_planned_to_the_byte(tmp_path: Path) -> None:
    """Those of rows, of padding and snapshots, of each stage's layers and each rank's heads, as a start makes them."""
    folder = make_checkpoint(tmp_path, "qwen3_next")
    for overrides in ((), ("parallel.pp=2", "parallel.tp=2"), ("cache.num_snapshots=3",)):
        plan = make_plan(configure(folder, "schedule.max_seqs=70", *overrides), 8 * GIB)
        parallel, snapshots = plan.config.parallel, resolve_num_snapshots(plan.config.cache, plan.spec, 70)
        for rank in plan.ranks:
            part = stage_parts(plan.spec, parallel.pp, parallel.tp)[rank.stage]
            own = make_stage_spec(make_rank_spec(plan.spec, parallel.tp), part)
            states = build_states(own, 70, snapshots, plan.dtype, torch.device("cpu"), can_sleep=False)
            held = 0 if states is None else states.recurrent.nbytes + states.inputs.nbytes
            assert rank.states == held
        assert sum(rank.states for rank in plan.ranks) > 0


def test_states_of_16_bits_take_half(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_5_text", linear_value_head_dim=256)
    plans = [make_plan(configure(model, f"cache.state_dtype={each}"), 8 * GIB) for each in ("float32", "bfloat16")]
    (plain,), (rounded,) = (plan.ranks for plan in plans)
    first, *others = plans[0].spec.recurrences
    numbers = first.num_value_heads * first.key_dim * first.value_dim * (1 + len(others))
    max_seqs = plans[0].limits.max_seqs
    num_states = max_seqs + 1 + resolve_num_snapshots(plans[0].config.cache, plans[0].spec, max_seqs)
    assert plain.states - rounded.states == 2 * numbers * num_states
    assert "states in bfloat16;" in next(plan_lines(plans[1]))


def test_a_cache_in_fp8_holds_more(model: Path) -> None:
    plain, small = (
        make_plan(configure(model, "model.dtype=bfloat16", *more), 8 * GIB) for more in ([], ["cache.dtype=fp8"])
    )
    (rank,), (of_small,) = plain.ranks, small.ranks
    assert rank.kv_token == 2 * of_small.kv_token
    assert rank.largest_step - of_small.largest_step == plain.limits.max_tokens * of_small.kv_token
    assert 1.8 * plain.num_tokens < small.num_tokens < 2.1 * plain.num_tokens
    assert "bfloat16, cache in fp8;" in next(plan_lines(small))


@pytest.mark.parametrize(
    ("override", "rows", "tokens"),
    [
        ("attention.backend=triton", 8, 4096),
        ("attention.backend=reference", 0, 0),
        ("attention.backend=flashinfer", 0, 0),
        ("model.batch_invariant=true", 8, 0),
    ],
)
def test_graphs_that_are_not_captured_take_no_memory(model: Path, override: str, rows: int, tokens: int) -> None:
    def plan_tokens(*overrides: str) -> int:
        few = ("model.dtype=bfloat16", "cache.page_size=1", "schedule.max_seqs=8")
        return make_plan(configure(model, *few, *overrides), 8 * GIB).num_tokens

    spec, (rank,) = read_spec(model), make_plan(configure(model, "model.dtype=bfloat16"), 8 * GIB).ranks
    of_graphs = count_graph_bytes(spec, torch.bfloat16, rows, tokens)
    taken = (plan_tokens("graphs.enabled=false") - plan_tokens(override)) * (rank.kv_token + 4)
    assert taken == pytest.approx(of_graphs, abs=rank.kv_token + 4)


def test_what_tensor_ranks_share_is_part_of_a_step(model: Path) -> None:
    """Two parts of a quarter of the tokens, of float32 values."""
    tokens = ("parallel.tp=4", "schedule.max_tokens=1024", "schedule.max_seqs=8")
    (with_it, *_), (without, *_) = (
        make_plan(configure(model, *tokens, f"parallel.async_tp_min_tokens={least}"), 8 * GIB).ranks
        for least in (64, 0)
    )
    assert with_it.largest_step - without.largest_step == 2 * 256 * read_spec(model).hidden_size * 4
    assert with_it.num_tokens < without.num_tokens


def test_kv_heads_are_repeated(model: Path) -> None:
    one, four = (make_plan(configure(model, f"parallel.tp={tp}"), 8 * GIB).ranks for tp in (1, 4))
    assert four[0].kv_token == one[0].kv_token // 2


@pytest.mark.parametrize(
    ("overrides", "memory", "message"),
    [
        (["parallel.tp=3"], 8, r"^parallel\.tp=3: .* use one of 1, 2, 4$"),
        (["parallel.pp=6"], 8, r"^parallel\.pp=6: the model has 5 layers"),
        ([], 1, "weights a GPU where"),
        (["schedule.max_seqs=1000000", "schedule.max_tokens=1000000"], 2, r"^schedule\.max_seqs=1000000"),
    ],
)
def test_what_cannot_be_planned(model: Path, overrides: list[str], memory: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_plan(configure(model, *overrides), memory * GIB)


def test_lines(model: Path) -> None:
    config = configure(model, "parallel.pp=2", "parallel.dp=2", "cache.num_tokens=1600")
    lines = list(plan_lines(make_plan(config, 8 * GIB)))
    assert "4 GPUs of 8.00 GiB, 90% of each" in lines[0]
    assert [line.split()[:5] for line in lines[3:7]] == [
        ["0", "0", "0", "0", "0-2"],
        ["1", "0", "1", "0", "3-4"],
        ["2", "1", "0", "0", "0-2"],
        ["3", "1", "1", "0", "3-4"],
    ]
    assert "cache.num_tokens=1600: fits" in lines


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_memory", lambda: None)
    assert cli.main(["plan", f"model.path={model}"]) == 2
    assert "--gpu-memory" in capsys.readouterr().err
    assert cli.main(["plan", f"model.path={model}", "--gpu-memory", "8", "parallel.dp=2"]) == 0
    out = capsys.readouterr().out
    assert "2 GPUs of 8.00 GiB" in out
    assert cli.main(["plan", f"model.path={model}", "--gpu-memory", "8", "parallel.tp=3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["plan", "--gpu-memory", "-1"])
