"""What a model's parameters cost on a rank: the sum over its layers' matrices.

Specs are those of the rank, see `division.make_rank_spec`. Knows no torch.
"""

from __future__ import annotations

from toka_async.checkpoint.spec import ModelSpec


def count_layer_bytes(spec: ModelSpec, layer: int, itemsize: int) -> int:
    """Counts the bytes of a layer's parameters. itemsize: bytes of a value that is not quantized."""
    own = spec.layers[layer]
    norms = (own.norms.count + (own.input is not None)) * spec.hidden_size
    others = norms + own.mixer.count_weights() + bool(own.scalar)
    return others * itemsize + sum(matrix.count_bytes(itemsize) for matrix in spec.list_matrices(layer))


def count_stage_bytes(spec: ModelSpec, is_first: bool, is_last: bool, itemsize: int) -> int:
    """Counts the bytes of a stage's parameters. A tied head costs nothing where one stage also has the embedding.

    spec: of the stage's layers, with the rows of the vocabulary that the rank holds.
    """
    table = spec.vocab_size * spec.hidden_size
    has_head = is_last and not (is_first and spec.tie_embeddings)
    inputs = sum(matrix.num_outputs * matrix.num_inputs for matrix in spec.input_matrices)
    inputs += spec.layers[0].input.size if spec.layers[0].input is not None else 0  # their norm
    ends = is_first * (table + inputs) + has_head * table + is_last * spec.hidden_size
    return ends * itemsize + sum(count_layer_bytes(spec, layer, itemsize) for layer in range(spec.num_layers))
