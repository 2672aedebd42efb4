"""Passes of decoding rows from the device's tables, captured and not: a runner with kernels, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fake_graphs import FakeGraphs
from tests.fake_model import FakeAttention, FakeCache, FakeModel, hash_of
from tests.row_driver import VOCAB, Driver, Request, Row
from toka_async.arrays import as_f32, as_i32, column, i32_column
from toka_async.attention.base import PrefixGroup
from toka_async.messages import Ready, Sampling
from toka_async.runner.decode import DecodePass
from toka_async.runner.runner import Runner
from toka_async.runner.synthetic import SyntheticRows

GREEDY, RANDOM, PENALISED = Sampling(temperature=0), Sampling(), Sampling(temperature=0.9, repetition_penalty=1.4)
SLOW = Sampling(temperature=0.9, frequency_penalty=1.5)
