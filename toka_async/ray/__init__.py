"""Many replicas of a model on a Ray cluster (extra `ray`).

    with Fleet(8, "Qwen/Qwen2.5-7B-Instruct") as fleet:
        fleet.wait()
        with fleet.sync_pool() as pool:
            results = pool.generate_many(prompts, n=16, max_tokens=512)

Jobs of Ray Data have their engines inside: `toka_async.ray.data.generate`, which is imported from there, since Ray Data
loads pandas.

Ray places, counts and restarts replicas. Requests do not pass through it: clients talk to the replicas themselves, by
direct submission.
"""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("toka_async.ray needs Ray: pip install 'toka-async[ray]'") from error

from toka_async.ray.fleet import Fleet, FleetError
from toka_async.ray.status import ReplicaStatus

__all__ = ["Fleet", "FleetError", "ReplicaStatus"]
