from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.cases.models import make_checkpoint
from toka_async.attention.build import BuiltAttention
from toka_async.attention.states import build
from toka_async.attention.states.backend import StateBackend
from toka_async.attention.states.build import add_graph_states, add_states, build_states, explain_no_states
from toka_async.checkpoint.spec import read_spec

CPU = torch.device("cpu")


def test_only_models_with_recurrent_layers_have_states(tmp_path: Path) -> None:
    plain = read_spec(make_checkpoint(tmp_path / "plain", "qwen3"))
    assert build_states(plain, 3, 2, torch.float32, CPU, can_sleep=False) is None
    spec = read_spec(make_checkpoint(tmp_path / "hybrid", "qwen3_5_text"))
    states = build_states(spec, 3, 2, torch.bfloat16, CPU, can_sleep=False)
    assert states is not None
    assert states.recurrent.shape == (3 + 1 + 2, 2, 4, 8, 12)
    assert states.inputs.shape == (3 + 1 + 2, 2, 3, 80)
    of_one = sum(each[0].nbytes for each in (states.recurrent, states.inputs))
    assert spec.count_state_bytes(2) == of_one


def test_plain_torch_is_not_captured(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_5_text"))
    states = build_states(spec, 3, 2, torch.float32, CPU, can_sleep=False)
    assert states is not None
    built = add_states(BuiltAttention(Mock()), states)
    assert isinstance(built.backend, StateBackend)
    assert (built.graphs, built.mixed) == (None, None)


def test_steps_are_captured_where_attention_is() -> None:
    attention, ops = Mock(), Mock()
    built = add_graph_states(BuiltAttention(attention, graphs=attention, mixed=attention), ops)
    assert built.graphs is not None
    assert built.mixed is not None
    batch = Mock()
    built.graphs.plan_graph(batch, True)
    attention.plan_graph.assert_called_once_with(batch, True)
    ops.plan_graph.assert_called_once_with(batch)
    for number, each in enumerate((built.graphs, built.mixed), 1):
        each.set_groups(())
        assert attention.set_groups.call_count == number
    assert add_graph_states(BuiltAttention(attention), ops).mixed is None


def test_says_what_cannot_compute_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_no_states(CPU, batch_invariant=False) == ""
    assert "model.batch_invariant=true" in explain_no_states(CPU, batch_invariant=True)
    monkeypatch.setattr(build, "explain_no_kernels", lambda _: "the package triton is not installed")
    reason = explain_no_states(torch.device("cuda"), batch_invariant=False)
    assert reason == "recurrent layers need our kernels on a GPU: the package triton is not installed"
