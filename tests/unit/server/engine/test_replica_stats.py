from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from toka_async.messages import Stats
from toka_async.server.engine.replica_stats import counters, merged


def test_sums_worst_percentiles_and_mean_lengths() -> None:
    one = Stats(num_running=1, num_steps=3, step_seconds=0.5, depths=(1, 2), scheduler_us=(5.0, 6.0, 9.0))
    two = Stats(num_running=2, num_steps=4, depths=(1, 0, 4), scheduler_us=(1.0, 7.0, 8.0), expected_length=(0.5, 0.1))
    both = merged([one, two])
    assert (both.num_running, both.num_steps, both.step_seconds) == (3, 7, 0.5)
    assert both.depths == (2, 2, 4)
    assert both.scheduler_us == (5.0, 7.0, 9.0)
    assert both.expected_length == (0.5, 0.1)
    assert merged([one]) is one


def test_times_of_stages_are_summed_stage_by_stage() -> None:
    parts = [Stats(pipeline=((1.0, 0.5, 0.0), (2.0, 0.25, 0.5))), Stats(), Stats(pipeline=((3.0, 0.5, 1.0),))]
    assert merged(parts).pipeline == ((4.0, 1.0, 1.0), (2.0, 0.25, 0.5))


def test_what_stays_of_a_scheduler_that_is_gone() -> None:
    stats = Stats(
        num_running=3, pages_used=2, num_pages=9, generated_tokens=7, depths=(1,), scheduler_us=(1.0, 2.0, 3.0)
    )
    assert counters(stats) == Stats(generated_tokens=7, depths=(1,))


@given(st.data())
def test_every_field_is_merged(data: st.DataObject) -> None:
    """With nothing else, a replica's statistics stay what they are, whatever field is set."""
    labels = ("replica", "life", "answers", "forecast")
    names = [field.name for field in msgspec.structs.fields(Stats) if field.name not in labels]
    name = data.draw(st.sampled_from(names))
    value = {
        "depths": (1, 2),
        "token_gaps": (1, 2),
        "scheduler_us": (1.0, 2.0, 3.0),
        "forecast_us": (1.0, 2.0, 3.0),
        "stage_seconds": (0.5,),
        "expected_length": (0.5, 0.25),
        "pipeline": ((2.0, 0.5, 0.25), (3.0, 0.25, 0.125)),
    }.get(name, 3)
    stats = msgspec.structs.replace(Stats(), **{name: value})
    assert merged([stats, Stats()]) == stats
