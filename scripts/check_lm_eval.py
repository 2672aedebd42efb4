"""Checks the log-likelihoods that lm-evaluation-harness gets from this server against transformers' own.

Starts a server on a model directory (the built-in model without one) in float32, and asks it through the harness'
`local-completions` model class, which echoes prompts with log-probs: token ids one by one, in batches and concurrently,
and texts. A second instance of the class has the same requests scored by transformers from the same checkpoint, so how
texts become tokens and windows is the harness' affair in both. Prints a table; exits 1 when something differs.

Needs `pip install lm_eval[api]` besides the `test` extra. Knows the command line and the HTTP API, nothing inside.

    python scripts/check_lm_eval.py [MODEL_DIR]
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM

import toka_async

TOLERANCE = 1e-3  # of a whole log-likelihood
TIE = 1e-3  # between two log-probs: either token may be the likelier one
DEMO = Path(toka_async.__file__).parent / "demo"

STORY = "Question: Tom has 5 apples. He buys 3 more apples. How many apples does Tom have?\nAnswer:"
PAIRS = [
    (STORY, " Tom has 5 + 3 = 8 apples.\n#### 8"),
    (STORY, " 8"),
    (STORY, " #### 9"),
    (STORY + " ", "Tom has"),  # the harness moves the space
    ("Question: 2", " + 2"),
    ("", "Question: Ana has 12 books."),  # empty context: the harness puts the end-of-text token there
    (".", "x"),  # not only spaces: the harness moves those to the continuation
    ("Zürich, naïve café —", " 東京 и Москва 🙂👩‍👩‍👧"),
    ("一二三", "四五六七八九十"),
    (STORY * 8, " Tom"),
]
TEXTS = ["Ana", STORY, "Ünïcödé 🙂 \n\t 你好", STORY * 3]
WINDOWS = "She finds 7 more books and gives 2 to each of her friends. "

Scored = tuple[float, bool | None]  # log-likelihood, and whether greedy decoding gives these tokens; None: a near tie
Score = Callable[[list[int], int], Scored]  # of all token ids and the number of those that are context


@contextmanager
def serving(model_dir: Path) -> Iterator[str]:
    """The URL of a server that is gone afterwards."""
    overrides = [f"model.path={model_dir}", "model.served_name=checked", "model.dtype=float32", "server.port=0"]
    command = [sys.executable, "-m", "toka_async.cli", "serve", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            yield line.split()[-1]
        finally:
            process.terminate()


def context_length(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        return int(json.load(response)["data"][0]["max_model_len"])


def harness(url: str, model_dir: Path, max_length: int, **options: Any) -> Any:
    """The harness' model class, as its `--model local-completions` builds it."""
    return LocalCompletionsAPI(
        model="checked",
        tokenizer=str(model_dir),
        base_url=f"{url}/v1/completions",
        tokenizer_backend="huggingface",
        max_length=max_length,
        max_retries=1,
        **options,
    )


def scorer(model: Any) -> Score:
    """Scores of a transformers model."""

    @torch.inference_mode()
    def score(ids: list[int], num_context: int) -> Scored:
        logits = model(input_ids=torch.tensor([ids])).logits[0, num_context - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(ids[num_context:])[:, None])[:, 0]
        others = logprobs.scatter(-1, torch.tensor(ids[num_context:])[:, None], -torch.inf).amax(-1)
        lead = float((chosen - others).min()) if len(chosen) else 1.0
        return float(chosen.sum()), None if abs(lead) < TIE else lead > 0

    return score


def scored_by(lm: Any, score: Score) -> Any:
    """`lm` with its requests scored here instead of by a server."""

    def score_requests(requests: Sequence[Any], **_options: object) -> list[Scored]:
        inputs, num_contexts, _ = lm.batch_loglikelihood_requests([requests])
        return [score(ids, num) for ids, num in zip(inputs, num_contexts, strict=True)]

    lm._loglikelihood_tokens = score_requests
    return lm


@torch.inference_mode()
def likeliest(lm: Any, model: Any, context: str, num_tokens: int = 8) -> str:
    """What greedy decoding gives, so that some continuation is greedy."""
    ids = lm.tok_encode(context)
    output = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return str(lm.tokenizer.decode(output[0, len(ids) :].tolist(), skip_special_tokens=True))


def results(lm: Any, pairs: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Scored]:
    """What the harness' class says of every pair and, whole, of every text."""
    kinds: tuple[Any, Any] = ("loglikelihood", "loglikelihood_rolling")
    of_pairs = [Instance(kinds[0], {}, pair, place) for place, pair in enumerate(pairs)]
    of_texts = [Instance(kinds[1], {}, (text,), place) for place, text in enumerate(texts)]
    rolling = lm.loglikelihood_rolling(of_texts, disable_tqdm=True)
    return [*lm.loglikelihood(of_pairs, disable_tqdm=True), *((value, None) for value in rolling)]


def agrees(got: Scored, wanted: Scored) -> bool:
    return abs(got[0] - wanted[0]) <= TOLERANCE and (wanted[1] is None or got[1] == wanted[1])


def report(mode: str, names: Sequence[str], got: Sequence[Scored], wanted: Sequence[Scored]) -> int:
    """Prints a line a case; the number of wrong ones."""
    print(f"\n{mode}\n{'log-likelihood':>15} {'reference':>15} {'difference':>11} {'greedy':>7}       case")
    for name, mine, theirs in zip(names, got, wanted, strict=True):
        verdict = "ok" if agrees(mine, theirs) else "WRONG"
        greedy = "-" if mine[1] is None else str(mine[1])
        print(f"{mine[0]:15.5f} {theirs[0]:15.5f} {mine[0] - theirs[0]:11.1e} {greedy:>7} {verdict:5} {name}")
    return sum(not agrees(*both) for both in zip(got, wanted, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks log-likelihoods through lm-evaluation-harness.")
    parser.add_argument("model_dir", type=Path, nargs="?", default=DEMO, help="default: the built-in model")
    model_dir: Path = parser.parse_args().model_dir
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with serving(model_dir) as url:
        max_length = context_length(url)
        reference = scored_by(harness(url, model_dir, max_length), scorer(model))
        pairs = [*PAIRS, (STORY, likeliest(reference, model, STORY)), ("Question: Ana", " has")]
        long = WINDOWS * (2 * max_length // len(reference.tok_encode(WINDOWS)) + 1)
        texts = [*TEXTS, long]
        wanted = results(reference, pairs, texts)
        names = [*(f"{context[-16:]!r} + {then!r}" for context, then in pairs), *(repr(text[:32]) for text in texts)]
        modes: dict[str, dict[str, Any]] = {
            "token ids": {},
            "token ids, batches of 4": {"batch_size": 4},
            "token ids, 8 at once": {"num_concurrent": 8},
        }
        tokenizer = reference.tokenizer
        if tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids:
            # Else the server begins texts with a token that the harness does not count.
            modes["texts"] = {"tokenized_requests": False}
        num_wrong = 0
        for mode, options in modes.items():
            got = results(harness(url, model_dir, max_length, **options), pairs, texts)
            num_wrong += report(mode, names, got, wanted)
    print(f"\n{len(modes) * len(names)} log-likelihoods, {num_wrong} wrong (tolerance {TOLERANCE:g})")
    return num_wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
