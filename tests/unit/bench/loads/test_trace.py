from __future__ import annotations

import gzip
import random
import statistics
from pathlib import Path

import pytest

from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.trace import draw_trace, read_trace

ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\nt,374,44\nt,396,0\nt,879,55\n"


def test_the_first_requests(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_text(ROWS)
    packed.write_bytes(gzip.compress(ROWS.encode()))
    assert read_trace(plain, 2) == [(374, 44), (396, 1)]
    assert read_trace(packed, 3) == [(374, 44), (396, 1), (879, 55)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROWS, "--requests 4: .* has 3"),
        (ROWS.replace("GeneratedTokens", "Other"), "no column 'GeneratedTokens'"),
        (ROWS.replace("396", "x"), "line 3: ContextTokens: .*'x'"),
        (ROWS.replace("396,0", "396"), "line 3: GeneratedTokens: .*None"),
        ("", "no column"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(BenchError, match=words):
        read_trace(path, 4)


def test_drawn_lengths_are_like_the_trace() -> None:
    lengths = draw_trace(4000, random.Random(1))
    prompts, outputs = zip(*lengths, strict=True)
    assert (min(prompts), min(outputs)) >= (1, 1)
    assert max(prompts) <= 14050
    assert max(outputs) <= 1000
    assert 1050 < statistics.fmean(prompts) < 1350  # of the trace: 1,155
    assert 180 < statistics.fmean(outputs) < 235  # 211
    assert 110 < statistics.median(outputs) < 170  # 129
