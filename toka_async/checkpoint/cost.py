"""What a model's parameters cost on a rank: the sum over its layers' matrices.

Specs are those of the rank, see `division.make_rank_spec`. Knows no torch.
"""

from __future__ import annotations

from toka_async.checkpoint.spec import ModelSpec


def count_layer_bytes(spec: ModelSpec, layer: int, itemsize: int) -> int:
    """Counts the bytes of a layer's parameters. itemsize: bytes of a value that is not quantized."""
    norms = spec.layers[layer].norms.count * spec.hidden_size + spec.layers[layer].mixer.count_weights()
    return norms * itemsize + sum(matrix.count_bytes(itemsize) for matrix in spec.list_matrices(layer))


def count_stage_bytes(spec: ModelSpec, is_first: bool, is_last: bool, itemsize: int) -> int:
    """Counts the bytes of a stage's parameters. A tied head costs nothing where one stage also has the embedding.

    spec: of the stage's layers, with the rows of the vocabulary that the rank holds.
    """
    table = spec.vocab_size * spec.hidden_size
    has_head = is_last and not (is_first and spec.tie_embeddings)
    ends = is_first * table + has_head * table + is_last * spec.hidden_size
    return ends * itemsize + sum(count_layer_bytes(spec, layer, itemsize) for layer in range(spec.num_layers))
