"""Reads a model's shape from its `config.json`.

Reads both spellings: `rope_theta`, `rope_scaling`, `torch_dtype`, and the newer `rope_parameters`, `dtype`. Knows no
torch, no weights and no tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.checkpoint.families import FAMILIES, ExpertsFamily, Family
from toka_async.checkpoint.json_file import JsonFile, ModelError
from toka_async.checkpoint.layer_spec import DenseFeedSpec, FeedSpec, LayerSpec, NormSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.checkpoint.quantization import MADE_AT_LOAD, Quantization, read_quantization
from toka_async.checkpoint.rope_spec import RopeSpec, read_rope

__all__ = ["ModelError", "ModelSpec", "RopeSpec", "read_spec"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
DTYPES = ("float32", "bfloat16", "float16")
MOST_LAYERS, MOST_HEADS = 4096, 65536  # far beyond any model; objects for more would take all memory
MOST_EXPERTS = 1024  # of a layer, likewise; a kernel compares the scores of all of a token's


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer."""

    family: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    norm: NormSpec
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    max_context: int  # tokens
    dtype: str  # the checkpoint's: float32, bfloat16 or float16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each half of a layer adds
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0  # c of c * tanh(logit / c); 0: none
    fp32_logits: bool = False  # `model.fp32_logits`; no checkpoint says it
    impl: Literal["native", "transformers"] = "native"  # whose code computes the layers

    def count_logit_bytes(self, itemsize: int) -> int:
        """Counts the bytes of a row's logits; itemsize: of a value of the model's dtype."""
        return self.vocab_size * (4 if self.fp32_logits else itemsize)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Those of the layers that keep keys and values in the cache, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def attention(self) -> AttentionSpec:
        """The first layer's that has one; layers may differ only in window and rope."""
        return self.attentions[0]

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of `attentions`."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The layers' different ropes, each once."""
        return tuple(dict.fromkeys(each.rope for each in self.attentions if each.rope is not None))

    def list_matrices(self, layer: int) -> tuple[MatrixSpec, ...]:
        """Returns all matrices of a layer."""
        each = self.layers[layer]
        return *each.list_mixer_matrices(self.hidden_size), *each.list_feed_matrices(self.hidden_size)

    def name_formats(self, dtype: str) -> str:
        """Names the dtype, and the formats of weights that have another: "bfloat16, weights in fp8/block"."""
        formats = {layer.format for layer in self.layers if layer.format != "dense"}
        return ", ".join((dtype, *(f"weights in {name.partition('/weight_')[0]}" for name in sorted(formats))))

    @property
    def embedding_matrix(self) -> MatrixSpec:
        """What embeds token ids: a row for each."""
        vocabulary, hidden = Units(self.vocab_size), Units(self.hidden_size)
        return MatrixSpec(names=("model.embed_tokens",), outputs=(vocabulary,), inputs=hidden, split="outputs")

    @property
    def head_matrix(self) -> MatrixSpec:
        """What scores hidden states."""
        embedding = self.embedding_matrix
        return embedding if self.tie_embeddings else msgspec.structs.replace(embedding, names=("lm_head",))


def read_spec(model_dir: Path, quantize: str = "none") -> ModelSpec:
    """Raises ModelError, which names the field and the fix.

    quantize: a key of `MADE_AT_LOAD`, or "none": weights have the checkpoint's format.
    """
    file = JsonFile(model_dir / "config.json")
    name = file.text("model_type")
    family = FAMILIES.get(name)
    if family is None:
        raise file.error("model_type", f"{name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    num_layers = file.integer("num_hidden_layers", most=MOST_LAYERS)
    max_positions = file.integer("max_position_embeddings", family.max_positions)
    rope = read_rope(file, max_positions, family.rope_theta)
    bos = file.token_ids("bos_token_id", family.bos_token_ids)
    spec = ModelSpec(
        family=name,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        norm=NormSpec(file.number("rms_norm_eps", family.norm_eps)),
        tie_embeddings=file.flag("tie_word_embeddings", False),
        layers=tuple(
            map(LayerSpec, _read_attentions(file, family, num_layers, rope), _feeds(file, family, num_layers))
        ),
        max_context=rope.max_context(max_positions),
        dtype=_one_of(file, "dtype" if file.has("dtype") else "torch_dtype", "float32", DTYPES),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=file.token_ids("eos_token_id", family.eos_token_ids),
    )
    return _quantize(spec, _choose_quantization(file, quantize))


def _choose_quantization(file: JsonFile, quantize: str) -> Quantization | None:
    found = read_quantization(file)
    if found is not None and quantize != "none":
        raise file.error("quantization_config", f"says that weights are quantized; leave out model.quantize={quantize}")
    return MADE_AT_LOAD.get(quantize, found)


def _quantize(spec: ModelSpec, quantization: Quantization | None) -> ModelSpec:
    """Gives the layers their weight format."""
    if quantization is None:
        return spec
    layers = []
    for index, layer in enumerate(spec.layers):
        exempt: list[str] = []
        for matrix in spec.list_matrices(index):
            names = [name for name in matrix.names if not quantization.covers(f"model.layers.{index}.{name}")]
            if names and len(names) < len(matrix.names):
                raise ModelError(
                    f"model.layers.{index}: {', '.join(names)} is not quantized, but others of "
                    f"{', '.join(matrix.names)} are; they are multiplied as one matrix, so they must be alike"
                )
            exempt += names
        layers.append(msgspec.structs.replace(layer, format=quantization.format, exempt=tuple(exempt)))
    return msgspec.structs.replace(spec, layers=tuple(layers))


def _read_attentions(file: JsonFile, family: Family, num_layers: int, rope: RopeSpec) -> list[AttentionSpec]:
    """Returns each layer's."""
    num_heads, num_kv_heads, head_dim = _heads(file, family)
    alike = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        bias=_bias(file, "attention_bias", family.qkv_bias),
        output_bias=_bias(file, "attention_bias", family.output_bias),
        head_norm=family.head_norm,
    )
    return [msgspec.structs.replace(alike, window=window) for window in _windows(file, family, num_layers)]


def _heads(file: JsonFile, family: Family) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of KV heads, and the size of a head."""
    hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads", most=MOST_HEADS)
    default = heads
    if "num_key_value_heads" not in file.fields and family.num_kv_heads and heads % family.num_kv_heads == 0:
        default = family.num_kv_heads
    kv_heads = file.integer("num_key_value_heads", default)
    if heads % kv_heads:
        raise file.error("num_attention_heads", f"({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if "head_dim" not in file.fields and family.head_dim:
        head_dim = family.head_dim
    elif file.has("head_dim"):
        head_dim = file.integer("head_dim")
    elif hidden % heads:
        raise file.error("hidden_size", f"({hidden}) is not a multiple of num_attention_heads ({heads}); set head_dim")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise file.error("head_dim", f"is {head_dim}: rotary position embeddings need an even number")
    return heads, kv_heads, head_dim


def _bias(file: JsonFile, name: str, of_family: bool | None) -> bool:
    return file.flag(name, False) if of_family is None else of_family


def _one_of(file: JsonFile, name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = file.text(name, default).removeprefix("torch.")
    if value not in allowed:
        raise file.error(name, f"{value!r} is not supported; supported: {', '.join(allowed)}")
    return value


def _feeds(file: JsonFile, family: Family, num_layers: int) -> list[FeedSpec]:
    """Returns each layer's."""
    activation = _one_of(file, "hidden_act", "silu", ACTIVATIONS)
    experts = None if family.experts is None else _read_experts(file, family.experts, activation)
    sparse = set[int]() if experts is None else _find_sparse(file, family, num_layers)
    if experts is not None and len(sparse) == num_layers:
        return [experts] * num_layers
    dense = DenseFeedSpec(file.integer("intermediate_size"), activation, _bias(file, "mlp_bias", family.mlp_bias))
    return [experts if experts is not None and layer in sparse else dense for layer in range(num_layers)]


def _find_sparse(file: JsonFile, family: Family, num_layers: int) -> set[int]:
    """Returns the layers with experts."""
    if family.experts is not None and family.experts.in_all_layers:
        return set(range(num_layers))
    every, without = file.integer("decoder_sparse_step", 1), file.fields.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise file.error("mlp_only_layers", f"is {without!r}: expected a list of layers' numbers")
    return {layer for layer in range(every - 1, num_layers, every) if layer not in without}


def _read_experts(file: JsonFile, family: ExpertsFamily, activation: str) -> ExpertsFeedSpec | None:
    """Returns None where the configuration asks for no experts."""
    field = "num_local_experts" if file.has("num_local_experts") else "num_experts"
    num_experts = file.integer(field, family.num_experts, least=0, most=MOST_EXPERTS)
    top_k = file.integer("num_experts_per_tok", family.top_k)
    if not num_experts:
        return None
    if top_k > num_experts:
        raise file.error("num_experts_per_tok", f"({top_k}) is more than {field} ({num_experts})")
    renormalizes = family.renormalizes
    return ExpertsFeedSpec(
        inner=file.integer(family.inner_field, family.inner),
        activation=activation,
        num_experts=num_experts,
        top_k=top_k,
        renormalizes=file.flag("norm_topk_prob", False) if renormalizes is None else renormalizes,
        names=family.names,
    )


def _windows(file: JsonFile, family: Family, num_layers: int) -> tuple[int, ...]:
    if family.windows == "none":
        return (0,) * num_layers
    # Absent means the family's window (Mistral 7B v0.1 relies on it), null means none.
    window = file.fields.get("sliding_window", family.window)
    window = file.integer("sliding_window", window) if window else 0
    if family.windows == "all":
        return (window,) * num_layers
    if not file.flag("use_sliding_window", False):
        window = 0
    if family.windows == "all_if_used":
        return (window,) * num_layers
    if file.has("layer_types"):
        return tuple(_layer_window(file, kind, window) for kind in _layer_types(file, num_layers))
    first = file.integer("max_window_layers", 28, least=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _layer_types(file: JsonFile, num_layers: int) -> list[object]:
    kinds = file.fields["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise file.error("layer_types", f"must be a list of num_hidden_layers ({num_layers}) entries")
    return kinds


def _layer_window(file: JsonFile, kind: object, window: int) -> int:
    if kind == "full_attention":
        return 0
    if kind != "sliding_attention":
        raise file.error("layer_types", f"has {kind!r}; supported: full_attention, sliding_attention")
    if not window:
        raise file.error("layer_types", "has sliding_attention: set use_sliding_window and sliding_window as well")
    return window
