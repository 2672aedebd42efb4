"""instructor 1.17.0: typed answers by tools, by JSON schema and on responses, and partial ones in a stream.

toka-async serve model.chat_template=scripts/clients/tools.jinja &
python scripts/clients/use_instructor.py http://127.0.0.1:10210/v1
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any, Literal

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel

MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)


class Answer(BaseModel, extra="forbid"):
    """An answer."""

    state: Literal["open", "paid"]
    is_gift: bool


def use(url: str, mode: Mode) -> None:
    client: Any = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "temperature": 1.0, "max_retries": 0}
    for _ in range(4):
        answer = client.chat.completions.create(**asked, response_model=Answer)
        assert isinstance(answer, Answer), answer
    partial = [*client.chat.completions.create_partial(**asked, response_model=Answer)]
    assert partial[-1].state in ("open", "paid")
    print(f"instructor {version('instructor')}, openai {openai.__version__}: {mode.name}")


def main(url: str) -> None:
    for mode in MODES:
        use(url, mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
