"""Reads a model's shape from its `config.json`.

Reads both spellings: `rope_theta`, `rope_scaling`, `torch_dtype`, and the newer `rope_parameters`, `dtype`. Knows no
torch, no weights and no tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.delta_net_spec import DeltaNetSpec, StateDtype
from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertsFeedSpec
from toka_async.checkpoint.families import FAMILIES, TEXT_PARTS, ExpertsFamily, Family
from toka_async.checkpoint.json_file import JsonFile, ModelError
from toka_async.checkpoint.layer_spec import DenseFeedSpec, FeedSpec, LayerInputSpec, LayerSpec, NormSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.checkpoint.names import TEXT_PREFIXES
from toka_async.checkpoint.quantization import MADE_AT_LOAD, Quantization, name_default_dtype, read_quantization
from toka_async.checkpoint.read_attention import read_attentions, read_bias, read_scales
from toka_async.checkpoint.read_mixers import read_mixers
from toka_async.checkpoint.rope_spec import RopeSpec

__all__ = ["ModelError", "ModelSpec", "RopeSpec", "read_spec"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
DTYPES = ("float32", "bfloat16", "float16")
MOST_LAYERS = 4096  # far beyond any model; objects for more would take all memory
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
    layer_inputs: int = 0  # numbers that a token brings for the inputs of all layers, see `LayerInputSpec`
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
        return tuple(each for each in self.all_attentions if not each.reads_back)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that `attentions` are of."""
        mixers = ((number, layer.mixer) for number, layer in enumerate(self.layers))
        return tuple(number for number, each in mixers if isinstance(each, AttentionSpec) and not each.reads_back)

    @property
    def all_attentions(self) -> tuple[AttentionSpec, ...]:
        """Those of all layers that have any, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def attention(self) -> AttentionSpec:
        """The first layer's that has one."""
        return self.attentions[0]

    @property
    def recurrences(self) -> tuple[DeltaNetSpec, ...]:
        """Those of the layers that keep a state for each sequence, in order; they are alike."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNetSpec))

    def count_state_bytes(self, itemsize: int) -> int:
        """Counts the bytes of a sequence's states. itemsize: of a value of the model's dtype."""
        return sum(recurrence.count_state_bytes(itemsize) for recurrence in self.recurrences)

    @property
    def attention_kinds(self) -> dict[AttentionSpec, tuple[int, ...]]:
        """Those that a cache and a backend cannot have in common, with their places in `attentions`."""
        kinds: dict[AttentionSpec, tuple[int, ...]] = {}
        for index, attention in enumerate(self.attentions):
            kinds[attention.kind] = (*kinds.get(attention.kind, ()), index)
        return kinds

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of `attentions`."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The layers' different ropes, each once."""
        return tuple(dict.fromkeys(each.rope for each in self.attentions if each.rope is not None))

    @property
    def window(self) -> int:
        """The largest one of the layers; 0: none has one."""
        return max(self.windows, default=0)

    def fit_context(self, max_context: int) -> ModelSpec:
        """Returns the model for sequences of up to so many tokens: windows that no sequence outgrows are none.

        Longrope has its factors for that length, whatever a sequence's is: one that grows beyond the pre-training's
        context would need other keys than those that it has cached.
        """

        def fit(mixer: AttentionSpec) -> AttentionSpec:
            if mixer.window >= max_context:
                mixer = msgspec.structs.replace(mixer, window=0)
            rope = mixer.rope
            if rope is None or rope.kind != "longrope":
                return mixer
            rope = msgspec.structs.replace(rope, is_long=max_context > rope.original_max_position)
            return msgspec.structs.replace(mixer, rope=rope)

        layers = (
            msgspec.structs.replace(layer, mixer=fit(layer.mixer)) if isinstance(layer.mixer, AttentionSpec) else layer
            for layer in self.layers
        )
        return msgspec.structs.replace(self, layers=tuple(layers))

    def store_states(self, dtype: StateDtype) -> ModelSpec:
        """Returns the model with the states of recurrent layers stored in a type."""
        layers = (
            msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, state_dtype=dtype))
            if isinstance(layer.mixer, DeltaNetSpec)
            else layer
            for layer in self.layers
        )
        return msgspec.structs.replace(self, layers=tuple(layers))

    def list_matrices(self, layer: int) -> tuple[MatrixSpec, ...]:
        """Returns all matrices of a layer."""
        each = self.layers[layer]
        lists = each.list_mixer_matrices, each.list_feed_matrices, each.list_input_matrices
        return tuple(matrix for list_matrices in lists for matrix in list_matrices(self.hidden_size))

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
    def passed_size(self) -> int:
        """How many numbers of a token go from a stage of a pipeline to the next: its residual, and layers' inputs."""
        return self.hidden_size + self.layer_inputs

    @property
    def input_matrices(self) -> tuple[MatrixSpec, MatrixSpec]:
        """What makes the inputs of all layers: of token ids, a row for each, and of embedded tokens."""
        inputs = Units(self.layer_inputs)
        table = msgspec.structs.replace(self.embedding_matrix, names=("model.embed_tokens_per_layer",), inputs=inputs)
        projection = msgspec.structs.replace(
            self.embedding_matrix, names=("model.per_layer_model_projection",), outputs=(inputs,)
        )
        return table, projection

    @property
    def head_matrix(self) -> MatrixSpec:
        """What scores hidden states."""
        embedding = self.embedding_matrix
        return embedding if self.tie_embeddings else msgspec.structs.replace(embedding, names=("lm_head",))


def read_spec(model_dir: Path, quantize: str = "none") -> ModelSpec:
    """Raises ModelError, which names the field and the fix.

    quantize: a key of `MADE_AT_LOAD`, or "none": weights have the checkpoint's format.
    """
    file, name = _find_text_part(JsonFile(model_dir / "config.json"))
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join(sorted({*FAMILIES, *TEXT_PARTS}))
        hint = "" if file.prefix else "; try model.impl=auto"  # transformers runs no part of a model
        raise file.error("model_type", f"{name!r} is not supported natively; supported: {supported}{hint}")
    for field, default in family.refused:
        if file.fields.get(field, default):
            value = file.fields.get(field, default)
            raise file.error(field, f"is {value!r}: supported: 0; for such layers try model.impl=transformers")
    num_layers = file.integer("num_hidden_layers", most=MOST_LAYERS)
    hidden_size = file.integer("hidden_size")
    scales = read_scales(file, family, hidden_size)
    attentions = read_attentions(file, family, num_layers, scales)
    mixers, feeds = read_mixers(file, family, attentions), _feeds(file, family, num_layers)
    if family.heads_by_type and file.flag("use_double_wide_mlp", False):
        feeds = [_widen(feed) if each.reads_back else feed for feed, each in zip(feeds, attentions, strict=True)]
    layer_input = _read_layer_input(file, family)
    max_positions = file.integer("max_position_embeddings", family.max_positions)
    # A model that stretches the rope of some layers only states the positions that it has with that (Gemma 3).
    contexts = (each.rope.max_context(max_positions) for each in attentions if each.rope is not None)
    bos = file.token_ids("bos_token_id", family.bos_token_ids)
    spec = ModelSpec(
        family=name,
        vocab_size=file.integer("vocab_size"),
        hidden_size=hidden_size,
        norm=NormSpec(file.number("rms_norm_eps", family.norm_eps), family.norm_adds_one),
        tie_embeddings=file.flag("tie_word_embeddings", family.tied),
        layers=tuple(
            LayerSpec(*halves, family.norms, family.scalar, input=layer_input)
            for halves in zip(mixers, feeds, strict=True)
        ),
        layer_inputs=0 if layer_input is None else num_layers * layer_input.size,
        max_context=min(contexts, default=max_positions),
        dtype=_one_of(file, "dtype" if file.has("dtype") else "torch_dtype", name_default_dtype(file), DTYPES),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=file.token_ids("eos_token_id", family.eos_token_ids),
        embedding_scale=scales.embedding,
        residual_scale=scales.residual,
        logits_scale=scales.logits,
        logits_soft_cap=scales.logits_soft_cap,
    )
    return _quantize(spec, _choose_quantization(file, family, quantize))


def _find_text_part(file: JsonFile) -> tuple[JsonFile, str]:
    """Returns the fields of the model that reads and writes text, and its `model_type`.

    Of a model with other parts these are the fields of `text_config`, and what only the whole has. Whether logits are
    by the embedding is said by the whole, as in transformers, which writes another value into `text_config`.
    """
    name = file.text("model_type")
    if name == "mistral" and file.has("layer_types"):  # windows are by layer; transformers takes it so, too
        return file, "ministral"
    if name not in TEXT_PARTS:
        return file, name
    text = file.section("text_config")
    whole = {field: value for field, value in file.fields.items() if field not in ("text_config", "model_type")}
    tied = {field: value for field, value in whole.items() if field == "tie_word_embeddings"}
    return JsonFile(file.path, whole | text.fields | tied, text.prefix), text.text("model_type", TEXT_PARTS[name])


def _choose_quantization(file: JsonFile, family: Family, quantize: str) -> Quantization | None:
    found = read_quantization(file)
    if found is not None and quantize != "none":
        raise file.error("quantization_config", f"says that weights are quantized; leave out model.quantize={quantize}")
    if found is not None and family.experts is not None and family.experts.names.gate_up:
        raise file.error(
            "quantization_config", "quantizes experts that are one tensor; use the checkpoint in bfloat16 or MXFP4"
        )
    return MADE_AT_LOAD.get(quantize, found)


def _quantize(spec: ModelSpec, quantization: Quantization | None) -> ModelSpec:
    """Gives the layers their weight format."""
    if quantization is None:
        return spec
    layers = [msgspec.structs.replace(layer, format=quantization.format) for layer in spec.layers]
    spec = msgspec.structs.replace(spec, layers=tuple(layers))
    for index, layer in enumerate(spec.layers):
        exempt: list[str] = []
        for matrix in spec.list_matrices(index):
            names = [name for name in matrix.names if not _is_covered(quantization, f"layers.{index}.{name}")]
            if names and len(names) < len(matrix.names):
                raise ModelError(
                    f"model.layers.{index}: {', '.join(names)} is not quantized, but others of "
                    f"{', '.join(matrix.names)} are; they are multiplied as one matrix, so they must be alike"
                )
            exempt += names
        layers[index] = msgspec.structs.replace(layer, exempt=tuple(exempt))
    return msgspec.structs.replace(spec, layers=tuple(layers))


def _is_covered(quantization: Quantization, matrix: str) -> bool:
    """Tells whether a matrix is quantized, by whichever name a checkpoint with a text part may have for it."""
    return all(quantization.covers(f"{prefix}.{matrix}") for prefix in TEXT_PREFIXES)


def _one_of(file: JsonFile, name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = file.text(name, default).removeprefix("torch.")
    if value not in allowed:
        raise file.error(name, f"{value!r} is not supported; supported: {', '.join(allowed)}")
    return value


def _read_activation(file: JsonFile, family: Family) -> str:
    field = "hidden_activation" if file.has("hidden_activation") else "hidden_act"
    return _one_of(file, field, family.activation, ACTIVATIONS)


def _feeds(file: JsonFile, family: Family, num_layers: int) -> list[FeedSpec]:
    """Returns each layer's."""
    activation = _read_activation(file, family)
    experts = None if family.experts is None else _read_experts(file, family.experts, activation)
    sparse = set[int]() if experts is None else _find_sparse(file, family, num_layers)
    if experts is not None and len(sparse) == num_layers:
        return [experts] * num_layers
    bias = read_bias(file, "mlp_bias", family.mlp_bias)
    dense = DenseFeedSpec(file.integer("intermediate_size"), activation, bias, family.fused_gate_up)
    return [experts if experts is not None and layer in sparse else dense for layer in range(num_layers)]


def _widen(feed: FeedSpec) -> FeedSpec:
    assert isinstance(feed, DenseFeedSpec)
    return msgspec.structs.replace(feed, inner=2 * feed.inner)


def _read_layer_input(file: JsonFile, family: Family) -> LayerInputSpec | None:
    if not family.layer_inputs:
        return None
    size = file.integer("hidden_size_per_layer_input", family.layer_inputs, least=0)
    if size and file.integer("vocab_size_per_layer_input", file.integer("vocab_size")) != file.integer("vocab_size"):
        raise file.error("vocab_size_per_layer_input", "other than vocab_size is not supported")
    return LayerInputSpec(size, _read_activation(file, family)) if size else None


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
    if family.activation == CLAMPED_SWIGLU:
        for name, value in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
            if file.number(name, value) != value:
                raise file.error(name, f"other than {value:g} is not supported")
    return ExpertsFeedSpec(
        inner=file.integer(family.inner_field, family.inner),
        activation=family.activation or activation,
        num_experts=num_experts,
        top_k=top_k,
        renormalizes=(
            file.flag("norm_topk_prob", family.renormalizes_unsaid) if renormalizes is None else renormalizes
        ),
        shared=file.integer("shared_expert_intermediate_size", family.shared) if family.shared else 0,
        names=family.names,
        bias=family.bias,
    )
