"""`python -m toka_async.transformers`: answers one question on standard input, in JSON, for processes without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from toka_async.checkpoint.implementation import LibraryAnswer, LibraryQuestion
from toka_async.checkpoint.json_file import ModelError


def answer(question: LibraryQuestion) -> LibraryAnswer:
    """Describes a model, or lists the library's if no folder is named."""
    from toka_async.transformers.architectures import list_architectures
    from toka_async.transformers.describe import describe

    if not question.model_dir:
        return LibraryAnswer(architectures=list_architectures())
    try:
        spec = describe(Path(question.model_dir), question.trust_remote_code, question.tp, question.pp)
    except ModelError as error:
        return LibraryAnswer(error=str(error))
    return LibraryAnswer(spec=spec)


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=LibraryQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))


if __name__ == "__main__":
    main()
