"""The built-in model with special tokens that mark thoughts and calls, and with chat templates that know of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.cases.grammars import DEMO, NUM_TOKENS

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FIRST_MARK = NUM_TOKENS - len(MARKS)
SIGNS = '<tool_call> "arguments" <think>'  # of the formats hermes and think
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} SIGNS\n{% endif %}"
    "{% for m in messages %}Question: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
).replace("SIGNS", SIGNS)


def write_marked_model(folder: Path, template: str, marks: Sequence[str] = MARKS) -> Path:
    """Writes the model to a new folder. The marks take the ids of the last tokens that merges make."""
    path = folder / "marked"
    shutil.copytree(DEMO, path, ignore=shutil.ignore_patterns("__pycache__"))
    tokenizer = json.loads((path / "tokenizer.json").read_text("utf-8"))
    words, first = tokenizer["model"], NUM_TOKENS - len(marks)
    words["vocab"] = {word: token_id for word, token_id in words["vocab"].items() if token_id < first}
    words["merges"] = words["merges"][: -len(marks)]
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": first + place, "content": mark} for place, mark in enumerate(marks)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}), "utf-8")
    return path
