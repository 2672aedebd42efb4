"""A library of matrix products that computes with torch and takes the time that a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from toka_async.kernels.cublaslt import Algorithm, Product


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

    def run(self, product: Product, algorithm: Algorithm, x: Tensor, weight: Tensor, output: Tensor) -> bool:
        name = str(algorithm)
        if name in self.refused:
            return False
        self.ran.append((name, len(x)))
        self.time += self.costs[name](len(x))
        result = x @ weight.T
        output.copy_(output + result if product.adds else result)
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
