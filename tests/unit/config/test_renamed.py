from __future__ import annotations

from pathlib import Path

import pytest

from toka_async import cli
from toka_async.config import ConfigError, load_config
from toka_async.config.load import list_keys
from toka_async.config.renamed import GONE, RENAMED


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_names_the_new_one(old: str, tmp_path: Path) -> None:
    section, _, name = old.partition(".")
    path = tmp_path / "old.toml"
    path.write_text(f"[{section}]\n{name} = 1\n")
    for given in ((path,), (None, [f"{old}=1"]), (None, [old])):
        with pytest.raises(ConfigError) as caught:
            load_config(*given)
        assert str(caught.value) == f"{old} is now {RENAMED[old]}"
    assert RENAMED[old] in list_keys()
    assert old not in list_keys()


@pytest.mark.parametrize("old", GONE)
def test_a_key_that_is_gone_says_what_to_do(old: str, tmp_path: Path) -> None:
    section, _, name = old.partition(".")
    path = tmp_path / "old.toml"
    path.write_text(f"[{section}]\n{name} = 1\n")
    for given in ((path,), (None, [f"{old}=1"])):
        with pytest.raises(ConfigError, match=f"^{old} is gone: [a-z]"):
            load_config(*given)
    assert old not in list_keys()


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "server.zmq_bind=tcp://127.0.0.1:1"],
        ["serve", "server.zmq_bind"],  # no model of that name
        ["config", "--server.zmq_bind", "tcp://127.0.0.1:1"],
        ["batch", "run", "in", "out", "--server.zmq_bind=x"],
    ],
)
def test_the_command_line_says_so_in_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == "toka-async: server.zmq_bind is now zmq.bind\n"
