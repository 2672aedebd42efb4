"""Serves a replica that spans several nodes of a Ray cluster: `toka-async node` in an actor on each.

    python configs/deploy/ray_nodes.py --nodes 2 --gpus 8 /models/llama parallel.pp=2 parallel.tp=8 server.host=0.0.0.0

Every node needs this package and the model. The first actor's node is the leader, and serves; its log has the address.
Ray starts a lost actor again, and its node joins again. All ends with this program.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from toka_async.ray.engine import clean_environment

PATIENCE = 60.0  # seconds for Ray to find the nodes


class Node:
    """A machine of the replica. Its standard input is the lifeline: the node ends when the actor's worker has ended."""

    def find_address(self) -> str:
        return str(get_node_ip_address())

    def serve(self, secret: str, options: list[str]) -> int:
        """Run the node to its end; returns the exit code."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        environment = clean_environment(os.environ, gpus) | {"TOKA_CLUSTER_KEY": secret}
        command = [sys.executable, "-m", "toka_async.cli", "node", "--lifeline", *options]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
            return process.wait()


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="of each node")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each node, in Ray's count")
    parser.add_argument("--port", type=int, default=10212, help="where the leader's node listens for the others")
    return parser.parse_known_args()


def main() -> int:
    options, configuration = parse()
    ray.init()
    bundle = {name: amount for name, amount in (("GPU", options.gpus), ("CPU", options.cpus)) if amount}
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")
    if not group.wait(PATIENCE):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        sys.exit(f"there are no {options.nodes} nodes with {bundle} each; the cluster has {nodes}")
    node: dict[str, Any] = {"num_gpus": options.gpus, "num_cpus": options.cpus}
    lasting: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 2}
    places = [PlacementGroupSchedulingStrategy(group, index) for index in range(options.nodes)]
    actors = [ray.remote(Node).options(scheduling_strategy=place, **node, **lasting).remote() for place in places]
    leader = f"tcp://{ray.get(actors[0].find_address.remote())}:{options.port}"
    secret, size = secrets.token_hex(32), str(options.nodes)
    running = [
        each.serve.remote(secret, ["--leader", leader, "--index", str(index), "--size", size, *configuration])
        for index, each in enumerate(actors)
    ]
    (first,), _ = ray.wait(running)  # one that ended by itself: all is over, or the configuration is wrong
    return int(ray.get(first))


if __name__ == "__main__":
    sys.exit(main())
