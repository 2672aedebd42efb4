"""Writes the ground truths of BFCL in each format of tool calls, cuts them at random, and compares what is parsed.

    PYTHONPATH=. python scripts/check_tool_calls.py FOLDER --cuts 100

FOLDER is `bfcl_eval/data/possible_answer` of github.com/ShishirPatil/gorilla (berkeley-function-call-leaderboard). An
answer counts when it is the same whole, in every portioning, and as it was written. The exit code is 1 when one is not.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.cases.tool_calls import FORMATS, PROMPTS, Answer, draw_cuts, make_format, parse, write_answer

Call = tuple[str, dict[str, Any]]


def read_truths(folder: Path) -> Iterator[list[Call]]:
    """The calls of each turn; of several values that are right, the first."""
    for path in sorted(folder.glob("*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            truth = json.loads(line)["ground_truth"]
            for turn in truth if truth and isinstance(truth[0], list) else [truth]:
                calls = [read_call(each) for each in turn if isinstance(each, dict) or "(" in each]
                if calls:
                    yield calls


def read_call(given: Any) -> Call:
    if isinstance(given, str):  # of several turns: Python
        node = ast.parse(given, mode="eval").body
        assert isinstance(node, ast.Call)
        arguments = {f"arg{place}": ast.literal_eval(each) for place, each in enumerate(node.args)}
        arguments |= {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        return ast.unparse(node.func).replace(".", "_"), arguments
    ((name, options),) = given.items()
    chosen = {key: choose(values) for key, values in options.items() if values != [""]}
    return name.replace(".", "_"), chosen


def choose(values: Any) -> Any:
    value = values[0] if isinstance(values, list) and values else values
    if isinstance(value, dict):
        return {key: choose(each) for key, each in value.items()}
    if isinstance(value, list):
        return [choose([each]) for each in value]
    return value


def check(name: str, calls: list[Call], random: Random, num_cuts: int) -> bool:
    answer, format = Answer(calls=calls), make_format(name)
    text, prompt = write_answer(name, answer), PROMPTS.get(name, "")
    whole = parse(format, text, answer.tools, prompt=prompt)
    found = [(each.name, json.loads(each.arguments)) for each in whole.calls]
    if found != calls or whole.content:
        print(f"{name}: {text!r}\n  is read as {whole}")
        return False
    cuts = (draw_cuts(random, len(text)) for _ in range(num_cuts))
    return all(parse(format, text, answer.tools, each, prompt) == whole for each in cuts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--answers", type=int, help="so many, drawn at random; otherwise all")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    truths = list(read_truths(args.folder))
    if args.answers is not None:
        truths = Random(args.seed).sample(truths, args.answers)
    print(f"{len(truths)} answers, {sum(map(len, truths))} calls")
    failed = 0
    for name in args.formats:
        began, random = time.monotonic(), Random(args.seed)
        wrong = sum(not check(name, calls, random, args.cuts) for calls in truths)
        print(f"{name:14} {wrong} wrong   {time.monotonic() - began:.0f} s", flush=True)
        failed += wrong
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
