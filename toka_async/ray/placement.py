"""Says what a bundle of resources waits for: Ray itself waits without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def explain_waiting(
    bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> str:
    """Explain why no node has room for the bundle.

    nodes: all that each live node has. free: what is free now on all of them together.
    """
    wanted = _format(bundle)
    if not nodes:
        return f"it needs {wanted} on one node, and the cluster has no node"
    lacking = [name for name in bundle if all(node.get(name, 0) < bundle[name] for node in nodes)]
    if lacking:
        most = _format({name: max(node.get(name, 0) for node in nodes) for name in lacking})
        return f"it needs {wanted} on one node; the most that a node has is {most}"
    if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes):
        return f"it needs {wanted} on one node; nodes have each of it, but none has all"
    left = _format({name: free.get(name, 0) for name in bundle})
    return f"it needs {wanted} on one node, and others use it: free on all {len(nodes)} nodes together is {left}"


def _format(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
