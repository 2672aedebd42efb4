"""A layer's mixture of experts as data: gated networks of which each token passes through a few (arXiv:2401.04088).

Knows no torch and no files.
"""

from __future__ import annotations

from typing import Final

import msgspec

from toka_async.checkpoint.matrix_spec import MatrixSpec, Units

# gpt-oss: gate and up limited to 7, the gate from above only; then gate * sigmoid(1.702 * gate) * (up + 1).
CLAMPED_SWIGLU: Final = "clamped_swiglu"
SWIGLU_ALPHA: Final = 1.702
SWIGLU_LIMIT: Final = 7.0


class ExpertNames(msgspec.Struct, frozen=True):
    """What a family's checkpoints call the parts in a layer. gate, up, down: of each expert, behind its number.

    gate_up: if not empty, all experts' matrices are one tensor, transposed: [experts, inputs, outputs]. Then it is the
    name of gate and up, whose outputs take turns.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = ""
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"

    def name_matrix(self, number: int, name: str) -> str:
        """Names a matrix of an expert in its layer."""
        return f"{self.experts}.{name}" if self.gate_up else f"{self.experts}.{number}.{name}"

    def list_gate_up(self) -> tuple[str, ...]:
        """Names the matrices of gate and up, or their common one."""
        return (self.gate_up,) if self.gate_up else (self.gate, self.up)


class ExpertMatrixSpec(MatrixSpec, frozen=True, kw_only=True):
    """A matrix of each expert. names: of the first one. num_held: experts of the rank. num_experts: of all ranks."""

    num_held: int
    num_experts: int
    top_k: int

    def count_bytes(self, itemsize: int) -> int:
        return self.num_held * super().count_bytes(itemsize)

    def count_read_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Counts those of the experts that are chosen, if all are equally likely."""
        left_out = (1 - self.top_k / self.num_experts) ** num_tokens
        return int((1 - left_out) * self.count_bytes(itemsize))

    def count_flops(self, num_tokens: int) -> int:
        of_one = super().count_flops(num_tokens)
        return of_one * self.top_k * self.num_held // self.num_experts

    def list_products(self, num_tokens: int) -> tuple[int, int]:
        num_pairs = -(-num_tokens * self.top_k * self.num_held // self.num_experts)
        num_products = max(1, min(num_pairs, self.num_held))
        return num_products, -(-num_pairs // num_products)


class ExpertsFeedSpec(msgspec.Struct, frozen=True, tag="experts", kw_only=True):
    """`num_experts` networks of `inner` units, of which each token passes through `top_k`.

    renormalizes: a token's shares of its experts add up to 1. bias: router and experts have one. shared: units of a
    network of all tokens, whose share a gate of its own says; 0: there is none. num_groups: groups of tensor ranks,
    each of which has some of the experts; a group's ranks have a part of each unit. num_held: experts of a rank; all,
    in the whole model.
    """

    inner: int
    activation: str
    num_experts: int
    top_k: int
    renormalizes: bool
    names: ExpertNames
    shared: int = 0
    bias: bool = False
    num_groups: int = 1
    num_held: int = 0

    def can_divide(self, tp: int) -> bool:
        whole = tp % self.num_groups == 0 and self.num_experts % self.num_groups == 0
        return whole and self.inner % (tp // self.num_groups) == 0 and self.shared % tp == 0

    def divide(self, tp: int) -> ExpertsFeedSpec:
        """Returns what one of `tp` ranks computes."""
        return msgspec.structs.replace(
            self,
            inner=self.inner // (tp // self.num_groups),
            shared=self.shared // tp,
            num_held=self.num_experts // self.num_groups,
            num_groups=1,
        )

    def describe(self) -> str:
        """Names what tensor ranks divide."""
        grouped = f" in parallel.ep={self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.num_experts} experts{grouped} with a moe_intermediate_size of {self.inner}"

    def list_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, ...]:
        """Returns the router, whose weights are never quantized, gate and up as one, and down.

        Those of a shared expert follow: its gate, which is never quantized either, gate and up as one, and down.
        """
        hidden, inner, names = Units(hidden_size), Units(self.inner), self.names
        router = MatrixSpec(
            names=(self.names.router,),
            outputs=(Units(self.num_experts),),
            inputs=hidden,
            split="outputs",
            bias=self.bias,
        )
        gate_up = ExpertMatrixSpec(
            names=tuple(names.name_matrix(0, name) for name in names.list_gate_up()),
            outputs=(inner, inner),
            inputs=hidden,
            split="outputs",
            bias=self.bias,
            format=format,
            num_held=self.num_held or self.num_experts,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )
        down = msgspec.structs.replace(
            gate_up, names=(names.name_matrix(0, names.down),), outputs=(hidden,), inputs=inner, split="inputs"
        )
        return router, gate_up, down, *self._list_shared_matrices(hidden_size, format)

    def _list_shared_matrices(self, hidden_size: int, format: str) -> tuple[MatrixSpec, ...]:
        if not self.shared:
            return ()
        hidden, inner, names = Units(hidden_size), Units(self.shared), self.names
        first, last = (f"{names.shared}.{names.gate}", f"{names.shared}.{names.up}"), (f"{names.shared}.{names.down}",)
        return (
            MatrixSpec(names=(names.shared_gate,), outputs=(Units(1),), inputs=hidden, split="outputs"),
            MatrixSpec(names=first, outputs=(inner, inner), inputs=hidden, split="outputs", format=format),
            MatrixSpec(names=last, outputs=(hidden,), inputs=inner, split="inputs", format=format),
        )

    def count_values(self, hidden_size: int) -> int:
        """Counts a token's values that are alive at once, beside the layer's input: each expert's, and their sums."""
        of_shared = 3 * self.shared + hidden_size if self.shared else 0
        return self.top_k * (self.inner + hidden_size) + hidden_size + of_shared
