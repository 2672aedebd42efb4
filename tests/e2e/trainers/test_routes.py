"""A trainer gives the built-in model new weights by SGLang's and by vLLM's routes, and gets the old ones back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import toka_async
from tests.processes.serving import Serving, free_port, serving
from toka_async.control import GroupTransfer
from toka_async.integrations.weight_sender import WeightSender
from toka_async.transfer.checksum import sum_tensors
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.torch_group import TorchGroup, join_torch_group
from toka_async.transfer.wire import send_tensors

DEMO = Path(toka_async.__file__).with_name("demo")
SECONDS = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("routes"), "server.admin=true") as running:
        yield running
        assert "Traceback" not in running.said()


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}


def ask(server: Serving, path: str, **body: Any) -> Any:
    status, answer = server.post(path, **body)
    assert status == 200, answer
    return answer


def generate(server: Serving) -> Any:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    return ask(server, "/generate", input_ids=[5, 6, 7], sampling_params=sampling)


def beside(server: Serving, path: str, **body: Any) -> threading.Thread:
    """Asks while the trainer does its part."""
    thread = threading.Thread(target=ask, args=(server, path), kwargs=body)
    thread.start()
    return thread


def join(server: Serving) -> TorchGroup:
    place = {"rank_offset": 1, "world_size": 2, "backend": "gloo"}
    port = free_port()
    asked = beside(
        server, "/init_weights_update_group", master_address="127.0.0.1", master_port=str(port), group_name="g", **place
    )
    transfer = GroupTransfer(name="g", address="127.0.0.1", port=port, rank_offset=1, world_size=2, backend="gloo")
    group = join_torch_group(transfer, 0, torch.device("cpu"), Deadline(SECONDS))
    asked.join(SECONDS)
    return group


def test_a_group_of_sglangs(server: Serving, weights: dict[str, Tensor]) -> None:
    """Two parts in a pause are one update. The prefix of an earlier request is not found with other weights."""
    before, group = generate(server), join(server)
    changed = {name: tensor * 0.9 for name, tensor in weights.items()}
    for tensors, version in ((changed, "step-1"), (weights, "step-2")):
        ask(server, "/pause_generation")
        names = list(tensors)
        for part in (names[:7], names[7:]):
            asked = beside(
                server,
                "/update_weights_from_distributed",
                names=part,
                dtypes=["float32"] * len(part),
                shapes=[list(tensors[name].shape) for name in part],
                group_name="g",
                flush_cache=False,
                weight_version=version,
            )
            send_tensors(group, [(name, tensors[name]) for name in part], Deadline(SECONDS))
            asked.join(SECONDS)
        ask(server, "/continue_generation")
        now = generate(server)
        assert now["meta_info"]["weight_version"] == version
        assert now["meta_info"]["cached_tokens"] == 0
        assert (now["output_ids"] == before["output_ids"]) is (version == "step-2")
        sums = ask(server, "/weights_checker")["ranks"][0]["checksums"]
        assert sums == sum_tensors({name: tensors[name] for name in sums})
    ask(server, "/destroy_weights_update_group", group_name="g")
    group.close()


def test_what_is_missing_is_named_and_a_whole_update_recovers(server: Serving, weights: dict[str, Tensor]) -> None:
    before, sender = generate(server), WeightSender(server.url)
    name = "model.norm.weight"
    try:
        with pytest.raises(Exception, match=name.replace(".", r"\.")):
            sender.send([each for each in weights.items() if each[0] != name], "broken")
        assert sender.ask("/is_paused") == {"is_paused": True}
        assert sender.ask("/weight_info")["weight_version"] != "broken"
        sender.send(weights.items(), "whole")
        sender.resume()
    finally:
        sender.close()
    now = generate(server)
    assert (now["output_ids"], now["meta_info"]["weight_version"]) == (before["output_ids"], "whole")
    status, _ = server.post("/update_weights", weight_dir=str(DEMO))
    assert status == 200
