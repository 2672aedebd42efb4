"""outlines 1.3.3: types, choices, regular expressions and grammars with `from_vllm` and `from_openai`.

toka-async serve &
python scripts/clients/use_outlines.py http://127.0.0.1:10210/v1
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from typing import Any, Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel


class Answer(BaseModel, extra="forbid"):  # JSON schemas allow further properties, and outlines does not forbid them
    state: Literal["open", "paid"]
    is_gift: bool


def main(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    model: Any = outlines.from_vllm(client, "demo")
    sampling: dict[str, Any] = {"temperature": 1.0}
    Answer.model_validate_json(model("What is 3 + 4?", Answer, **sampling))
    assert model("What is 3 + 4?", Literal["yes", "no"], **sampling) in ("yes", "no")
    assert re.fullmatch("[0-9]{2}", model("What is 3 + 4?", Regex("[0-9]{2}"), **sampling))
    assert model("What is 3 + 4?", CFG('start: "a" | "b"'), **sampling) in ("a", "b")
    assert isinstance(int(model("What is 3 + 4?", int, **sampling)), int)
    streamed = "".join(model.stream("What is 3 + 4?", Answer, **sampling))
    Answer.model_validate_json(streamed)
    of_openai: Any = outlines.from_openai(client, "demo")
    Answer.model_validate_json(of_openai("What is 3 + 4?", Answer, **sampling))
    print(f"outlines {version('outlines')}, openai {openai.__version__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
