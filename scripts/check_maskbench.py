"""Compiles MaskBench's schemas exactly, as `strict` does, and holds its documents against them.

    PYTHONPATH=. python scripts/check_maskbench.py FOLDER TOKENIZER --schemas 1200

FOLDER is `maskbench/data` of github.com/guidance-ai/jsonschemabench, TOKENIZER a folder with a tokenizer.json. A schema
goes through what a request's does: its size, the grammar, its first mask. The exit code is 1 when an invalid document
is accepted, or a schema is refused without a reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.vocabulary import GrammarVocabulary
from toka_async.openai.errors import ApiError
from toka_async.openai.requests import GenerationFields
from toka_async.openai.structured import make_output_grammar, write_schema
from toka_async.text.tokenizer import Tokenizer, read_for_grammars

PARAM = "structured_outputs.json"
SHOWN = 12  # kinds of refusals
DETAIL = re.compile(r"(keys?|formats?|Unimplemented)[:!]? .*|\d+|\"[^\"]*\"|'[^']*'|`[^`]*`")


def make_grammar_of(schema: Any) -> str:
    """Raises ApiError."""
    fields = GenerationFields()
    return make_output_grammar(write_schema(schema, PARAM, {}), PARAM, fields).text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--schemas", type=int, default=0, help="how many, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="name the documents that are told wrong")
    args = parser.parse_args()
    paths = sorted(args.folder.glob("*.json"))
    if args.schemas:
        paths = Random(args.seed).sample(paths, args.schemas)
    tokenizer = Tokenizer.load(args.tokenizer)
    if tokenizer.eos_token_id is None:
        parser.error("the tokenizer names no eos_token")
    read, ends = partial(read_for_grammars, args.tokenizer), [tokenizer.eos_token_id]
    vocabulary = GrammarVocabulary(read, tokenizer.vocab_size, ends)
    vocabulary.check("start: /a/")  # waits for the tokens
    counts, refusals = Counter[str](), Counter[str]()
    compiling, masks, wrong = list[float](), list[float](), list[str]()
    started = time.process_time()
    for path in paths:
        case = json.loads(path.read_text(encoding="utf-8"))
        before = time.perf_counter()
        try:
            grammar = make_grammar_of(case["schema"])
            vocabulary.check(grammar)
        except (ApiError, GrammarError) as error:
            counts["refused"] += 1
            refusals[shorten(str(error))] += 1
            counts["refused without a reason"] += not str(error)
            continue
        compiling.append(1e3 * (time.perf_counter() - before))
        counts["compiled"] += 1
        matcher = vocabulary.compile(grammar)
        for number, test in enumerate(case["tests"]):
            row = matcher.deep_copy()
            is_accepted = True
            for token in tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), False):
                before = time.perf_counter()
                row.compute_bitmask()
                masks.append(1e6 * (time.perf_counter() - before))
                if not row.consume_token(token):
                    is_accepted = False
                    break
            is_accepted = is_accepted and row.is_accepting()
            kind = "valid" if test["valid"] else "invalid"
            counts[f"{kind} {'accepted' if is_accepted else 'refused'}"] += 1
            if is_accepted != test["valid"]:
                wrong.append(f"{path.name}, document {number}: {kind}, {'accepted' if is_accepted else 'refused'}")
    print(f"{len(paths)} schemas, {time.process_time() - started:.1f} s of CPU: {dict(counts)}")
    for name, values, unit in (("compiled with its first mask", compiling, "ms"), ("a mask", masks, "us")):
        p50, p99 = np.percentile(values, (50, 99))
        print(f"{name}: median {p50:.2f}, 99 % {p99:.2f}, longest {max(values):.2f} {unit}; {len(values)} of them")
    for reason, count in refusals.most_common(None if args.show else SHOWN):
        print(f"  {count:5d} refused: {reason}")
    for line in wrong if args.show else ():
        print(line)
    return bool(counts["invalid accepted"] or counts["refused without a reason"])


def shorten(reason: str) -> str:
    """Leaves out of a reason what is of one schema only."""
    return DETAIL.sub(lambda found: found[0] if found[0][0] in "kfU" else "…", reason)[:100]


if __name__ == "__main__":
    sys.exit(main())
