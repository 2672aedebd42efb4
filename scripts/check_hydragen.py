"""What attending to a shared prefix once changes in the numbers: a table of tokens and log-probs, with and without.

Hydragen (arXiv:2402.05099) is exact in real numbers; in floating-point ones it adds up in another order. Starts the
server three times for each dtype: without groups, with groups from two rows and one page on, and without groups but
with fewer rows at once, which changes shapes of matrices and so the numbers, too: that is the yardstick. Each computes
the same samples of prompts with few-shot prefixes of several lengths, greedily (one sample of each of many prompts with
the same prefix) and at a temperature (many seeded samples of one prompt). Knows the command line and the HTTP API.

    python scripts/check_hydragen.py model.path=/models/llama
    python scripts/check_hydragen.py --lengths 128,512 model.path=demo     # without a GPU, a minute
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from toka_async.bench.loads.served import Served, serve
from toka_async.bench.loads.texts import word_problem

ALONE = ("schedule.group_min_seqs=0",)
GROUPED = ("schedule.group_min_seqs=2", "schedule.group_min_tokens=1")
FEWER_ROWS = 8
TIMEOUT = 600.0  # seconds, of a request


@dataclass(frozen=True, slots=True)
class Sample:
    """Its tokens and their log-probs."""

    token_ids: list[int]
    logprobs: list[float]


Key = tuple[int, str]  # tokens of the prefix, greedy or sampled
Answers = dict[Key, list[Sample]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two runs of the same samples.

    same_samples: share without a difference. same_tokens: share of tokens before a sample's first difference.
    median_first: tokens before it, of the samples that have one; None: none has. mean_gap, max_gap: of log-probs before
    the first difference.
    """

    dtype: str
    prefix_tokens: int
    mode: str
    compared: str
    same_samples: float
    same_tokens: float
    median_first: float | None
    mean_gap: float
    max_gap: float


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return json.load(response)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        return json.load(response)


@dataclass(frozen=True, slots=True)
class Prompts:
    """prefix: token ids. questions: of each prompt, the ids after it."""

    prefix: list[int]
    questions: list[list[int]]


def make_prompts(url: str, length: int, number: int) -> Prompts:
    """Worked examples, of which the last `length` tokens are kept, then a question each."""
    draw = random.Random(length)

    def tokens(text: str) -> list[int]:
        ids: list[int] = post(f"{url}/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        return ids

    prefix: list[int] = []
    while len(prefix) < length:
        problem = word_problem(draw)
        prefix += tokens(f"Question: {problem.question}\nAnswer: {problem.answer}\n\n")
    questions = [tokens(f"Question: {word_problem(draw).question}\nAnswer:") for _ in range(number)]
    return Prompts(prefix[-length:], questions)


def fitting(options: argparse.Namespace, url: str) -> list[int]:
    """The lengths whose prompts fit the model's context; says which do not."""
    room: int = get(f"{url}/v1/models")["data"][0]["max_model_len"]
    fits = []
    for length in options.lengths:
        prompts = make_prompts(url, length, options.samples)
        needed = length + max(map(len, prompts.questions)) + options.tokens
        if needed <= room:
            fits.append(length)
        else:
            print(f"prefix of {length} tokens left out: {needed} tokens, the context has {room}", flush=True)
    return fits


def make_draws(answer: Any) -> list[Sample]:
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [Sample(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def ask(options: argparse.Namespace, served: Served) -> Answers:
    """All samples of one server."""
    url = f"{served.url}/v1/completions"
    common = {"max_tokens": options.tokens, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    plain = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    answers: Answers = {}
    for length in fitting(options, served.url):
        prompts = make_prompts(served.url, length, options.samples)
        # The prefix is in the cache first, so that all prompts share its pages.
        post(url, {"prompt": prompts.prefix, "max_tokens": 1})
        whole = [prompts.prefix + question for question in prompts.questions]
        greedy = {"prompt": whole, "temperature": 0}
        sampled = {"prompt": whole[0], "n": options.samples, "temperature": options.temperature, "seed": length}
        for mode, asked in (("greedy", greedy), ("sampled", sampled)):
            answers[length, mode] = make_draws(post(url, common | plain | asked))
    return answers


def compare(dtype: str, key: Key, compared: str, ours: Sequence[Sample], others: Sequence[Sample]) -> Difference:
    """Of samples of two runs, in the same order."""
    pairs = list(zip(ours, others, strict=True))
    firsts = [num_same(*pair) for pair in pairs]
    ends = [len(sample.token_ids) for sample in ours]
    different = [first for first, end in zip(firsts, ends, strict=True) if first < end]
    gaps = [
        abs(a - b)
        for (sample, other), first in zip(pairs, firsts, strict=True)
        for a, b in zip(sample.logprobs[:first], other.logprobs[:first], strict=True)
    ]
    return Difference(
        dtype=dtype,
        prefix_tokens=key[0],
        mode=key[1],
        compared=compared,
        same_samples=1 - len(different) / len(pairs),
        same_tokens=sum(firsts) / sum(ends),
        median_first=statistics.median(different) if different else None,
        mean_gap=statistics.fmean(gaps) if gaps else 0.0,
        max_gap=max(gaps, default=0.0),
    )


def num_same(sample: Sample, other: Sample) -> int:
    """Tokens before the first difference."""
    pairs = zip(sample.token_ids, other.token_ids, strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def measure(options: argparse.Namespace, dtype: str) -> Iterator[Difference]:
    """All comparisons of one dtype."""
    runs = {"alone": (options.samples, ALONE), "grouped": (options.samples, GROUPED), "fewer": (FEWER_ROWS, ALONE)}
    answers: dict[str, Answers] = {}
    for name, (max_seqs, overrides) in runs.items():
        print(f"{dtype}: {name}", flush=True)
        rows = [f"model.dtype={dtype}", f"schedule.max_seqs={max_seqs}"]
        with serve([*options.overrides, *rows, *overrides]) as served:
            answers[name] = ask(options, served)
    for key, ours in answers["alone"].items():
        yield compare(dtype, key, "groups", ours, answers["grouped"][key])
        yield compare(dtype, key, f"{FEWER_ROWS} rows", ours, answers["fewer"][key])


def table(differences: Sequence[Difference]) -> str:
    """Markdown."""
    lines = [
        "| dtype | prefix | tokens chosen | against | samples all equal | tokens equal | median first difference "
        "| log-prob gap: mean | max |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for d in differences:
        first = "none" if d.median_first is None else f"{d.median_first:g}"
        lines.append(
            f"| {d.dtype} | {d.prefix_tokens} | {d.mode} | {d.compared} | {d.same_samples:.0%} | {d.same_tokens:.1%} "
            f"| {first} | {d.mean_gap:.1e} | {d.max_gap:.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration of all servers")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--samples", type=int, default=64, help="of each prefix and way to choose tokens")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bfloat16", "float32"])
    parser.add_argument(
        "--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[128, 512, 2048]
    )
    parser.add_argument("--json", type=Path, help="file to write the table to")
    options = parser.parse_args()
    differences = [difference for dtype in options.dtypes for difference in measure(options, dtype)]
    print(f"\n{options.samples} samples of {options.tokens} tokens, against the same without groups:\n")
    print(table(differences))
    if options.json:
        options.json.write_text(json.dumps([asdict(difference) for difference in differences], indent=1))


if __name__ == "__main__":
    main()
