"""New weights in a running engine, against transformers with the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases.models import MXFP4, heads, make_checkpoint
from tests.drivers.engine import Engine
from tests.drivers.page_rank import submit
from tests.drivers.weight_updates import Trainer, read_checkpoint
from toka_async.control import AbandonUpdate, Pause, PauseMode, ResetPrefixCache, Resume, Sleep, Wake
from toka_async.messages import TokenSampling
from toka_async.transfer.checksum import sum_tensors

SHAPES: dict[str, dict[str, Any]] = {
    "llama-tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": heads(5, 1, 40, attention_bias=True),
    "phi3": {},
    "glm4": {},
    "gemma4_text": {},
    "qwen3_moe-mixed-layers": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral-transformers": {},
    "gpt_oss": {},
    "gemma3_text": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9] * 4, [200, 3, 4], [7] * 20]
NUM_TOKENS = 24
TOLERANCE = 1e-5  # of log-probs


def make_pair(tmp_path: Path, shape: str) -> tuple[Path, Path]:
    """Checkpoints of one shape and different weights."""
    family = shape.partition("-")[0]
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        folder.mkdir()
        make_checkpoint(folder, family, seed=seed, **SHAPES[shape])
    return old, new


def verify(engine: Engine, folder: Path) -> None:
    """Greedy tokens and their log-probs are those of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    sampling = TokenSampling(temperature=0.0, num_logprobs=0)
    for prompt, result in zip(PROMPTS, engine.run(PROMPTS, max_tokens=NUM_TOKENS, sampling=sampling), strict=True):
        assert result.prefilled is not None
        tokens, logprobs = result.samples[0].token_ids, result.samples[0].logprobs
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float((expected - torch.tensor(logprobs)).abs().max()) < TOLERANCE


FROM_FOLDERS = ("llama-tied", "qwen3_moe-mixed-layers", "mixtral-transformers", "gpt_oss")


@pytest.mark.parametrize(
    ("shape", "way"), [*((shape, "shared memory") for shape in SHAPES), *((shape, "folder") for shape in FROM_FOLDERS)]
)
def test_an_updated_engine_is_one_that_started_with_the_weights(tmp_path: Path, shape: str, way: str) -> None:
    old, new = make_pair(tmp_path, shape)
    engine = Engine(old, impl="transformers" if shape.endswith("transformers") else "native")
    trainer, tensors = Trainer(engine), read_checkpoint(new)
    addresses = [parameter.data_ptr() for parameter in engine.runner.model.parameters()]  # type: ignore[attr-defined]
    verify(engine, old)
    assert trainer.sums() == sum_tensors(read_checkpoint(old))
    if way == "folder":
        trainer.begin()
        assert trainer.read(new).error == ""
        assert trainer.finish().error == ""
    else:
        trainer.update(sorted(tensors.items(), key=lambda item: hash(item[0])))
    assert trainer.sums() == sum_tensors(tensors)
    verify(engine, new)
    assert addresses == [parameter.data_ptr() for parameter in engine.runner.model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantize", ["fp8_block", "fp8"])
def test_quantized_weights_are_those_of_a_start(tmp_path: Path, quantize: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shape: dict[str, Any] = heads(4, 2, 128, intermediate_size=256, head_dim=64)
    for seed, folder in enumerate((old, new)):
        folder.mkdir()
        make_checkpoint(folder, "llama", seed=seed, **shape)
    engine, started = Engine(old, quantize=quantize), Engine(new, quantize=quantize)
    trainer = Trainer(engine)
    trainer.update([*read_checkpoint(new).items()])
    assert trainer.sums() == Trainer(started).sums()
    trainer.update([(name, tensor / 2) for name, tensor in read_checkpoint(new).items()])  # which halves scales alone
    halved = trainer.sums()
    assert [name for name, value in Trainer(started).sums().items() if halved[name] == value] == []
    trainer.update([*read_checkpoint(new).items()])
    tokens = [[each.samples[0].token_ids for each in one.run(PROMPTS)] for one in (engine, started)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("shape", ["qwen3", "qwen3_5_text"])
def test_new_prompts_find_nothing_of_older_weights_and_rows_that_run_keep_theirs(tmp_path: Path, shape: str) -> None:
    old, new = make_pair(tmp_path, shape)
    engine = Engine(old, page_size=4)
    trainer = Trainer(engine)
    engine.run(PROMPTS)
    running = engine.driver.submit(submit(50, PROMPTS[0], max_tokens=40, sampling=TokenSampling(temperature=0.0)))
    for _ in range(10):
        engine.driver.turn()
    assert running.prefilled is not None
    assert running.prefilled.cached_tokens > 0
    trainer.update([*read_checkpoint(new).items()])
    verify(engine, new)  # beside the row that runs
    assert all(
        each.prefilled is not None and each.prefilled.cached_tokens == 0
        for each in list(engine.driver.received.values())[-len(PROMPTS) :]
    )
    assert len(running.samples[0].token_ids) == 40
    engine.run(PROMPTS)
    assert engine.driver.received[max(engine.driver.received)].prefilled.cached_tokens > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", ["qwen3", "gpt_oss", "qwen3_5_text"])
def test_weights_with_nan_leave_nothing_behind(tmp_path: Path, shape: str) -> None:
    old, new = make_pair(tmp_path, shape)
    engine = Engine(old)
    trainer = Trainer(engine)
    trainer.update([(name, torch.full_like(tensor, torch.nan)) for name, tensor in read_checkpoint(new).items()])
    engine.run(PROMPTS * 4, max_tokens=40)
    trainer.update([*read_checkpoint(new).items()])
    verify(engine, new)


@pytest.mark.parametrize("shape", ["phi3", "qwen3_5_text"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_samples_that_start_after_an_update_compute_their_prompt_again(
    tmp_path: Path, shape: str, page_size: int
) -> None:
    old, new = make_pair(tmp_path, shape)
    expected = Engine(new).run(PROMPTS[:1], max_tokens=NUM_TOKENS)[0].samples[0].token_ids
    engine = Engine(old, page_size=page_size, max_seqs=2)
    trainer, fields = Trainer(engine), {"n": 5, "max_tokens": NUM_TOKENS, "sampling": TokenSampling(temperature=0.0)}
    row = engine.driver.submit(submit(50, PROMPTS[0], **fields))
    while row.prefilled is None:
        engine.driver.turn()
    trainer.act(Pause(mode="keep"))
    trainer.update([*read_checkpoint(new).items()])
    trainer.act(Resume())
    engine.driver.drain()
    tokens = [each.token_ids for each in row.samples]
    assert tokens[0] == tokens[1] != expected  # they ran already, and keep the keys and values that they have
    assert tokens[2:] == [expected] * 3


def test_a_prompt_in_the_middle_starts_over_at_an_update(tmp_path: Path) -> None:
    old, new = make_pair(tmp_path, "phi3")
    prompt = [*range(100, 200)]
    expected = Engine(new).run([prompt], max_tokens=NUM_TOKENS)[0].samples[0].token_ids
    engine = Engine(old, max_tokens=16)
    row = engine.driver.submit(submit(50, prompt, max_tokens=NUM_TOKENS, sampling=TokenSampling(temperature=0.0)))
    for _ in range(3):
        engine.driver.turn()
    assert row.prefilled is None
    Trainer(engine).update([*read_checkpoint(new).items()])
    engine.driver.drain()
    assert row.samples[0].token_ids == expected


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_states_of_recurrent_layers_outlive_pauses(tmp_path: Path, mode: PauseMode) -> None:
    """With `keep` they stay; with `retract` they are computed again, from snapshots where there are any."""
    engine, rng = Engine(make_pair(tmp_path, "qwen3_5_text")[0], page_size=4), random.Random(3)
    trainer, sampling = Trainer(engine), TokenSampling(temperature=0.0, num_logprobs=0)
    expected = [each.samples[0] for each in engine.run(PROMPTS, max_tokens=NUM_TOKENS, sampling=sampling)]
    trainer.act(ResetPrefixCache())
    messages = [submit(50 + i, prompt, max_tokens=NUM_TOKENS, sampling=sampling) for i, prompt in enumerate(PROMPTS)]
    rows = [engine.driver.submit(message) for message in messages]
    while engine.driver.turn():
        if rng.random() < 0.3:
            trainer.act(Pause(mode=mode))
            assert not engine.driver.turn()
            trainer.act(Resume())
    for row, same in zip(rows, expected, strict=True):
        assert row.samples[0].token_ids == same.token_ids
        assert row.samples[0].logprobs == pytest.approx(same.logprobs, abs=0 if mode == "keep" else TOLERANCE)


def test_experts_in_mxfp4_come_from_a_folder_or_unpacked(tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, "gpt_oss", seed=seed, quantization_config=MXFP4)
    trainer, expected = Trainer(Engine(folders[0])), Trainer(Engine(folders[1])).sums()
    trainer.begin()
    done = trainer.load([*read_checkpoint(folders[1]).items()])
    assert "_blocks: dtype 'uint8' is not known" in done.error
    trainer.act(AbandonUpdate())
    trainer.begin()
    assert trainer.read(folders[1]).error == ""
    assert trainer.finish().error == ""
    assert trainer.sums() == expected
    make_checkpoint(folders[1], "gpt_oss", seed=2)
    trainer.update([*read_checkpoint(folders[1]).items()])
    assert trainer.sums() == sum_tensors(read_checkpoint(folders[1]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("unknown", "model.layers.7.mlp.down_proj.weight: the model has no such tensor; did you mean"),
        ("fused", "model.layers.0.self_attn.qkv_proj.weight: it is a fused matrix; use self_attn.q_proj"),
        ("tied", "lm_head.weight: the model's embeddings are tied"),
        ("shape", "model.norm.weight has shape [7], the model's has [48]"),
        ("dtype", "model.norm.weight is of type float8_e4m3fn; supported: float64, float32, float16, bfloat16"),
        ("twice", "model.norm.weight comes twice in one update"),
    ],
)
def test_wrong_tensors_are_refused_by_name_and_nothing_is_written(tmp_path: Path, change: str, expected: str) -> None:
    old, new = make_pair(tmp_path, "llama-tied")
    engine = Engine(old)
    trainer, tensors = Trainer(engine), read_checkpoint(new)
    norm = tensors["model.norm.weight"]
    others = {
        "unknown": ("model.layers.7.mlp.down_proj.weight", norm),
        "fused": ("model.layers.0.self_attn.qkv_proj.weight", norm),
        "tied": ("lm_head.weight", tensors["model.embed_tokens.weight"]),
        "shape": ("model.norm.weight", norm[:7]),
        "dtype": ("model.norm.weight", norm.to(torch.float8_e4m3fn)),
        "twice": ("model.norm.weight", norm),
    }
    before = trainer.sums()
    trainer.begin()
    wrong = [("model.norm.weight", norm)] if change == "twice" else []
    done = trainer.load([*wrong, others[change]])
    assert expected in done.error
    assert done.count == 0
    trainer.act(AbandonUpdate())
    assert trainer.sums() == before
    waiting = engine.driver.submit(submit(50, PROMPTS[0]))
    assert not engine.driver.turn()  # paused
    trainer.update([*tensors.items()])
    trainer.act(Resume())
    engine.driver.drain()
    assert waiting.ended
    verify(engine, new)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    old, new = make_pair(tmp_path, "qwen3")
    engine = Engine(old)
    trainer, tensors = Trainer(engine), read_checkpoint(new)
    trainer.begin()
    assert trainer.finish().error == "the update has no tensors"
    del tensors["model.norm.weight"]
    assert trainer.load([*tensors.items()]).count > 0
    assert trainer.finish().error == "model.norm.weight is missing from the update"
    assert trainer.finish(partial=True).error == ""


def test_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    old, new = make_pair(tmp_path, "qwen3")
    engine = Engine(old)
    trainer, tensors = Trainer(engine), read_checkpoint(new)
    before = trainer.sums()
    trainer.begin()
    assert "there is no such folder" in trainer.read(tmp_path / "none").error
    last = max(tensors)
    save_file({**tensors, last: tensors[last][:3].contiguous()}, new / "model.safetensors")
    assert f"tensor {last} has shape" in trainer.read(new).error
    save_file({name: tensor for name, tensor in tensors.items() if name != last}, new / "model.safetensors")
    assert trainer.read(new).error == f"{last} is missing from the update"
    (new / "model.safetensors").write_bytes(b"short")
    assert "is not a readable safetensors file" in trainer.read(new).error
    trainer.act(AbandonUpdate())
    assert trainer.sums() == before


def test_a_cache_gives_its_memory_back_and_takes_it_again(tmp_path: Path) -> None:
    old, _ = make_pair(tmp_path, "qwen3")
    engine = Engine(old, num_tokens=1 << 16)
    trainer = Trainer(engine)
    first = [each.samples[0].token_ids for each in engine.run(PROMPTS)]
    before = resident_bytes()
    trainer.act(Pause(mode="abort"))
    assert trainer.act(Sleep()).error == ""
    cache_bytes = 2 * 2 * (1 << 16) * 1 * 8 * 4
    assert before - resident_bytes() > 0.8 * cache_bytes
    assert trainer.act(Wake()).error == ""
    trainer.act(Resume())
    trainer.act(ResetPrefixCache())
    assert [each.samples[0].token_ids for each in engine.run(PROMPTS)] == first


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096
