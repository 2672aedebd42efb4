from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import tokenizers as small
from toka_async.text.tokenizer import Tokenizer, read_for_grammars
from toka_async.text.tokenizer_files import TokenizerError


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_load(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    tokenizer = Tokenizer.load(write(tmp_path, small.byte_fallback(), config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.vocab_size == small.byte_fallback().vocab_size
    assert tokenizer.encode("the answer") == small.byte_fallback().encode("the answer")


def test_load_without_configuration(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, small.byte_level()))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.decode(tokenizer.encode("你好 the")) == "你好 the"


def test_special_tokens_map_counts_where_no_added_tokens_are_listed(tmp_path: Path) -> None:
    write(tmp_path, small.byte_level(), {"eos_token": None})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    assert Tokenizer.load(tmp_path).eos_token_id == small.byte_level().eos_token_id
    write(tmp_path, small.byte_level(), {"eos_token": None, "added_tokens_decoder": {}})
    assert Tokenizer.load(tmp_path).eos_token_id is None


def test_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    size = small.byte_level().vocab_size
    listed = {
        str(size + 1): {"content": "<late>", "special": False},
        str(size): {"content": "<early>", "special": True, "normalized": False},
        "7": {"content": "</s>", "special": True},
    }
    config = {"added_tokens_decoder": listed, "additional_special_tokens": ["<x>"], "pad_token": "<pad>"}
    tokenizer = Tokenizer.load(write(tmp_path, small.byte_level(), config))
    assert tokenizer.encode("<early><late><pad><x>") == [size, size + 1, size + 2, size + 3]
    assert tokenizer.decode(range(size, size + 4)) == "<late>"
    assert tokenizer.vocab_size == size + 4


def test_a_named_token_becomes_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, small.byte_level(), {"eos_token": "<tool> ☃"}))
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("a<tool> ☃b")) == "ab"


@pytest.mark.parametrize("special", [False, True])
def test_the_configuration_says_whether_a_token_is_special(tmp_path: Path, special: bool) -> None:
    listed = {"342": {"content": "<tool> ☃", "normalized": False, "special": special}}
    tokenizer = Tokenizer.load(write(tmp_path, small.byte_level(), {"added_tokens_decoder": listed}))
    assert tokenizer.decode(tokenizer.encode("a<tool> ☃b")) == ("ab" if special else "a<tool> ☃b")
    assert tokenizer.vocab_size == small.byte_level().vocab_size


@pytest.mark.parametrize("config", [None, {"eos_token": "</s>"}, {"added_tokens_decoder": {}}])
def test_grammars_read_a_file_as_it_is_to_which_nothing_is_added(tmp_path: Path, config: dict[str, Any] | None) -> None:
    write(tmp_path, small.byte_level(), config)
    edit(tmp_path, unknown="☃")  # which the library would not write
    assert read_for_grammars(tmp_path) == (tmp_path / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"900": {"content": "<late>", "special": False}}},
        {"added_tokens_decoder": {"342": {"content": "<tool> ☃", "normalized": False, "special": True}}},
        {"eos_token": "<tool> ☃"},
        {"pad_token": "<pad>"},
        {"additional_special_tokens": ["<x>"]},
    ],
)
def test_grammars_see_the_tokens_that_the_configuration_adds(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, small.byte_level(), config)
    assert read_for_grammars(tmp_path) == Tokenizer.load(tmp_path).backend.to_str()


@pytest.mark.parametrize("add_bos_token", [False, True])
def test_the_post_processor_decides_about_the_first_token(tmp_path: Path, add_bos_token: bool) -> None:
    config = {"bos_token": "<s>", "add_bos_token": add_bos_token}
    tokenizer = Tokenizer.load(write(tmp_path, small.byte_fallback(), config))
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1


def test_never_truncates_or_pads(tmp_path: Path) -> None:
    write(tmp_path, small.byte_level())
    length = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding: dict[str, Any] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    edit(tmp_path, truncation=length, padding=padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"})
    for text in ("a", "你好" * 50):
        assert Tokenizer.load(tmp_path).encode(text) == small.byte_level().encode(text)


def test_a_missing_file_is_one_line_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist.*model\.tokenizer=DIR") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00\x01"])
def test_a_corrupt_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_an_unsupported_decoder_is_named(tmp_path: Path) -> None:
    write(tmp_path, small.byte_level())
    edit(tmp_path, decoder={"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: decoder 'CTC' is not supported"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "config", ["{", "[1]", '{"eos_token": 3}', '{"added_tokens_decoder": [1]}', '{"chat_template": 1}']
)
def test_a_corrupt_configuration_is_named(tmp_path: Path, config: str) -> None:
    write(tmp_path, small.byte_level())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, small.byte_level(), {"chat_template": several})
    assert Tokenizer.load(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(tmp_path).chat_template == "F"
