"""A library of matrix products that computes with torch and takes the time that a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from toka_async.kernels.cublaslt import Algorithm, Product, Scales


class FakeLibrary:
    """Algorithms are names with a cost for each number of rows; torch, which it does not run, costs 10."""

    def __init__(self, costs: dict[str, Callable[[int], float]]) -> None:
        self.costs = costs
        self.refused: set[str] = set()
        self.time = 0.0
        self.ran: list[tuple[str, int]] = []
        self.version = 13

    def save(self, algorithm: Algorithm) -> list[int]:
        return [*str(algorithm).encode()]

    def restore(self, saved: Sequence[int]) -> Algorithm:
        if not saved:
            raise ValueError("no algorithm's")
        return Algorithm(bytes(saved).decode())

    def algorithms(self, product: Product, m: int) -> list[Algorithm]:  # noqa: ARG002
        return [Algorithm(name) for name in self.costs]

    def run(
        self,
        product: Product,
        algorithm: Algorithm,
        x: Tensor,
        weight: Tensor,
        output: Tensor,
        scales: Scales | None = None,
    ) -> bool:
        name = str(algorithm)
        if name in self.refused:
            return False
        self.ran.append((name, len(output)))
        self.time += self.costs[name](len(output))
        result = x @ weight.T if scales is None else _multiply_scaled(product, x, weight, *scales)
        part = output[: len(x)]
        part.copy_(part + result if product.adds else result)
        return True

    def is_rested(self, name: str) -> bool:
        """It did not run just before the run that has begun."""
        return len(self.ran) < 2 or self.ran[-2][0] != name

    def clock(self, call: Callable[[], None], num_calls: int) -> float:
        begin = self.time
        for _ in range(num_calls):
            before = self.time
            call()
            self.time += 10 if self.time == before else 0
        return self.time - begin


def _multiply_scaled(product: Product, x: Tensor, weight: Tensor, of_x: Tensor, of_weight: Tensor) -> Tensor:
    """Reads scales as the library does: those of groups by groups, those of blocks by rows of blocks."""
    if product.scaling == "channel":
        return (x.float() * of_x[: len(x)]) @ (weight.float() * of_weight[:, None]).T
    groups = of_x.repeat_interleave(128, 1)
    blocks = of_weight.repeat_interleave(128, 0).repeat_interleave(128, 1)[: product.n, : product.k]
    return (x.float() * groups) @ (weight.float() * blocks).T
