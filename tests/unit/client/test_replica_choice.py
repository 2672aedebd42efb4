from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np

from toka_async.client.replica_choice import PREFIX, ReplicaChoice, ReplicaRoom, hash_prefix


def make_choice(count: int, max_samples: int = 1 << 20) -> tuple[ReplicaChoice[ReplicaRoom], list[ReplicaRoom]]:
    choice: ReplicaChoice[ReplicaRoom] = ReplicaChoice(Random(0))
    replicas = [ReplicaRoom(f"tcp://10.0.0.{i}:1", max_samples, 1 << 20) for i in range(count)]
    for replica in replicas:
        choice.add(replica)
    return choice, replicas


def make_keys(count: int) -> list[int]:
    return [hash_prefix(np.asarray([i, 7], np.int32), "") for i in range(count)]


def test_prefixes_are_spread_evenly_and_move_only_with_their_replica() -> None:
    choice, replicas = make_choice(10)
    keys = make_keys(5000)
    before = [choice.find_owner(key) for key in keys]
    counts = Counter(replica.url for replica in before if replica is not None)
    assert len(counts) == 10
    assert 350 < min(counts.values()) <= max(counts.values()) < 650
    choice.remove(replicas[3])
    after = [choice.find_owner(key) for key in keys]
    assert all(new is old for old, new in zip(before, after, strict=True) if old is not replicas[3])
    assert replicas[3] not in after
    choice.add(replicas[3])
    assert [choice.find_owner(key) for key in keys] == before


def test_every_client_finds_the_same_owner() -> None:
    one, two = make_choice(5)[0], ReplicaChoice[ReplicaRoom](Random(1))
    for replica in reversed(make_choice(5)[1]):
        two.add(replica)
    for key in make_keys(50):
        first, second = one.find_owner(key), two.find_owner(key)
        assert first is not None
        assert second is not None
        assert first.url == second.url


def test_a_prompt_is_its_first_tokens_and_its_salt() -> None:
    prompt = np.arange(PREFIX + 50, dtype=np.int32)
    longer, other = prompt.copy(), prompt.copy()
    longer[-1], other[0] = 5, 5
    assert hash_prefix(prompt, "") == hash_prefix(longer, "")
    assert len({hash_prefix(prompt, ""), hash_prefix(other, ""), hash_prefix(prompt, "a")}) == 3
    assert hash_prefix(b"hello", "") != hash_prefix(b"hallo", "")


def test_work_evens_out_over_two_choices() -> None:
    choice, replicas = make_choice(20)
    for _ in range(2000):
        replica = choice.find_room(1)
        assert replica is not None
        replica.tokens += 1
    assert max(each.tokens for each in replicas) <= 105, "the mean is 100"


def test_only_replicas_with_room_are_found() -> None:
    choice, replicas = make_choice(3, max_samples=4)
    for replica, samples in zip(replicas, (4, 2, 0), strict=True):
        replica.samples = samples
        choice.note(replica)
    assert {choice.find_room(1) for _ in range(50)} == {replicas[1], replicas[2]}
    assert {choice.find_room(3) for _ in range(50)} == {replicas[2]}
    assert {choice.find_room(9) for _ in range(50)} == {replicas[2]}, "alone"
    choice.remove(replicas[2])
    assert choice.find_room(3) is None
    choice.remove(replicas[1])
    assert choice.find_room(1) is None
    choice.remove(replicas[0])
    assert choice.find_owner(1) is None


def deal(choice: ReplicaChoice[ReplicaRoom], keys: list[int], num_samples: int) -> None:
    for key in keys:
        replica = choice.choose(key, num_samples)
        assert replica is not None
        replica.samples += num_samples
        replica.tokens += num_samples
        choice.num_samples += num_samples
        choice.note(replica)


def test_no_request_waits_for_its_own_replica_while_another_has_rows() -> None:
    choice, replicas = make_choice(2)
    for replica in replicas:
        replica.max_samples, replica.max_running = 5120, 4096
    deal(choice, make_keys(16), 512)
    assert [each.samples for each in replicas] == [4096, 4096]
    deal(choice, make_keys(4), 512)
    assert [each.samples for each in replicas] == [5120, 5120], "the next ones wait where they will run"


def test_one_prefix_of_all_requests_is_bounded_at_its_replica() -> None:
    choice, replicas = make_choice(10)
    for replica in replicas:
        replica.max_running = 640
    (key,) = make_keys(1)
    deal(choice, [key] * 40, 1)
    own = next(each for each in replicas if each.samples)
    assert own.samples == 40, "so few are no faster elsewhere"
    deal(choice, [key] * 960, 1)
    assert 110 <= own.samples <= 125, "the mean is 100"
    assert min(each.samples for each in replicas) >= 90


def test_a_replica_that_is_idle_takes_what_is_its_own() -> None:
    choice, _ = make_choice(4, max_samples=64)
    keys = make_keys(20)
    owners = [choice.find_owner(key) for key in keys]
    assert [choice.choose(key, 500) for key in keys] == owners, "also more than run at once"
