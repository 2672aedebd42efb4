from __future__ import annotations

import msgspec
import pytest

from toka_async.arrays import EMPTY, i32_column
from toka_async.messages import (
    DropStop,
    FromRank,
    Message,
    Reason,
    Step,
    Submit,
    Tagged,
    TokenSampling,
    ToRank,
    ToScheduler,
    ToServer,
)


def classes(base: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    return sorted(base.__subclasses__(), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", classes(Message) + classes(Tagged))
def test_every_message_is_positional_and_frozen(cls: type[msgspec.Struct]) -> None:
    config = cls.__struct_config__
    assert config.array_like
    assert config.frozen
    assert not config.gc


@pytest.mark.parametrize("cls", classes(Tagged))
def test_every_whole_message_belongs_to_a_channel_by_its_name(cls: type[msgspec.Struct]) -> None:
    channels = [channel for union in (ToScheduler, ToServer, FromRank, ToRank) for channel in members(union)]
    assert cls in channels
    assert cls.__struct_config__.tag == cls.__name__


def members(union: object) -> tuple[object, ...]:
    return getattr(union, "__args__", (union,))


def test_a_small_message_is_a_few_bytes() -> None:
    assert len(msgspec.msgpack.encode(DropStop(stop_id=3))) == len("DropStop") + 3
    assert len(msgspec.msgpack.encode(Step(step_id=1))) < 64


def test_defaults_of_sampling_change_nothing() -> None:
    sampling = TokenSampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert sampling.end_ids == sampling.bias_ids == EMPTY
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs, sampling.min_tokens) == (-1, -1, 0)


def test_messages_are_built_by_name() -> None:
    submit = Submit(request_id=1, prompt=i32_column([1]), max_tokens=2, seed=3, sampling=TokenSampling())
    assert (submit.n, submit.stream, submit.priority, submit.stop_id) == (1, False, 0, -1)
    with pytest.raises(TypeError):
        DropStop(3)  # type: ignore[call-arg]


def test_no_reason_is_false() -> None:
    assert not Reason.NONE
    assert all(reason for reason in Reason if reason is not Reason.NONE)
