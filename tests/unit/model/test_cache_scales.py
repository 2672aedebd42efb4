from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toka_async.attention.kv_cache import LayerScales
from toka_async.checkpoint.division import StagePart
from toka_async.checkpoint.json_file import ModelError
from toka_async.model.cache_scales import parse_scale_name, read_cache_scales


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        ("k_scale", "k"),
        ("v_scale", "v"),
        ("attn.k_scale", "k"),
        ("k_proj.k_scale", "k"),
        ("v_proj.v_scale", "v"),
        ("qkv_proj.k_scale", "k"),
        ("k_proj.output_scale", "k"),
        ("v_proj.output_scale", "v"),
        ("kv_scale", "kv"),
        ("q_scale", "q"),
        ("attn.prob_scale", "prob"),
        ("prob_output_scale", "prob"),
        ("k_proj.weight_scale", None),
        ("k_proj.input_scale", None),
        ("o_proj.output_scale", None),
    ],
)
def test_names(rest: str, kind: str | None) -> None:
    assert parse_scale_name(f"model.layers.12.self_attn.{rest}") == (None if kind is None else (12, kind))


def save(path: Path, **scales: torch.Tensor) -> Path:
    save_file({f"model.layers.{name.replace('__', '.')}": scale for name, scale in scales.items()}, path)
    return path


def test_a_stage_reads_its_own_layers_out_of_all_files(tmp_path: Path) -> None:
    paths = [
        save(
            tmp_path / "1.safetensors",
            **{"0__self_attn__k_scale": torch.tensor(9.0), "1__self_attn__k_scale": torch.tensor([0.5])},
        ),
        save(
            tmp_path / "2.safetensors",
            **{
                "1__self_attn__v_scale": torch.tensor(2.0, dtype=torch.bfloat16),
                "3__self_attn__kv_scale": torch.tensor(4.0),
                "3__self_attn__q_scale": torch.tensor([-1.0, 2.0]),
                "4__self_attn__k_scale": torch.tensor(9.0),
            },
        ),
    ]
    scales = read_cache_scales(paths, StagePart(1, 4, 5))
    assert scales == (LayerScales(0.5, 2.0), LayerScales(), LayerScales(4.0, 4.0))


@pytest.mark.parametrize(
    ("names", "announced", "lacking"),
    [
        ([], False, ""),
        ([], True, "2, 3"),
        (["2.self_attn.kv_scale"], False, "3"),
        (["2.self_attn.kv_scale", "3.self_attn.k_scale"], False, "3"),
        (["2.self_attn.kv_scale", "3.self_attn.k_scale", "3.self_attn.v_scale"], True, ""),
    ],
)
def test_layers_without_scales_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], announced: bool, lacking: str
) -> None:
    """Unless no layer has any, and the checkpoint does not say that they have."""
    path = save(tmp_path / "model.safetensors", **{name.replace(".", "__"): torch.tensor(0.5) for name in names})
    read_cache_scales([path], StagePart(2, 4, 5), announced)
    assert ("in the layers " + lacking + ": 1 is used" in caplog.text) == bool(lacking)
    assert len(caplog.records) == bool(lacking)


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (torch.ones(2), "has 2 numbers; supported: one for a layer"),
        (torch.tensor(0.0), "is 0: expected a positive number"),
        (torch.tensor(-1.0), "is -1: expected a positive number"),
        (torch.tensor(torch.nan), "is nan: expected a positive number"),
    ],
)
def test_scales_that_mean_nothing(tmp_path: Path, scale: torch.Tensor, problem: str) -> None:
    path = save(tmp_path / "model.safetensors", **{"0__self_attn__k_scale": scale})
    with pytest.raises(ModelError, match=f"tensor model.layers.0.self_attn.k_scale {problem}"):
        read_cache_scales([path], StagePart(0, 1, 1))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        read_cache_scales([tmp_path / "model.safetensors"], StagePart(0, 1, 1))
