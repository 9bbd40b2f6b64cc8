"""From a Hugging Face config.json to `ModelConfig`: one reader per `model_type`.

transformers' own config class fills in absent keys and translates old spellings; it also swallows any key it does
not know. So every key of the file must stand in one of three lists here: keys that the family's reader reads, keys
that may only have a value that changes nothing (`NEUTRAL`), and keys that cannot matter (`INERT`).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from rljax.models.config import ModelConfig, Rope

Raw = dict[str, Any]

BASE = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id",
})
NEUTRAL: dict[str, tuple[Any, ...]] = {  # key -> the values under which it changes nothing (null always is one)
    "attention_dropout": (0,), "resid_pdrop": (0,), "embd_pdrop": (0,), "hidden_dropout": (0,), "dropout": (0,),
    "partial_rotary_factor": (1,), "rope_interleaved": (False,), "use_mrope": (False,), "is_llama_config": (True,),
    "use_bidirectional_attention": (False,), "is_causal": (True,), "is_decoder": (True, False),
    "is_encoder_decoder": (False,), "add_cross_attention": (False,), "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},), "per_layer_config": ({},), "mlp_only_layers": ([],), "decoder_sparse_step": (1,),
    "quantization_config": (), "attn_logit_softcapping": (), "final_logit_softcapping": (),
    "attention_bias": (False,), "qkv_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,),
    "use_sliding_window": (False,), "sliding_window": (), "sliding_window_pattern": (), "sliding_window_size": (),
    "max_window_layers": (), "no_rope_layers": (), "num_experts": (0,), "num_local_experts": (0,), "clip_qkv": (),
    "tie_encoder_decoder": (False,),
}
INERT = frozenset({
    # which file this is and what wrote it; custom code is never run
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "name_or_path",
    "_commit_hash", "auto_map", "transformers.js_config", "unsloth_fixed", "unsloth_version", "tokenizer_class",
    "use_bfloat16", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "_experts_implementation", "_flash_attn_2_enabled", "cache_implementation", "torchscript", "return_dict",
    "tf_legacy_loss",
    # the tokenizer's and the sampler's: read from their own files
    "pad_token_id", "sep_token_id", "bos_token", "eos_token", "pad_token", "decoder_start_token_id", "prefix",
    "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "temperature", "top_p", "top_k", "typical_p", "do_sample", "num_beams", "num_beam_groups", "max_length",
    "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "diversity_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "early_stopping",
    "remove_invalid_values", "exponential_decay_length_penalty", "return_dict_in_generate", "output_scores",
    # training by the original code, and other heads
    "use_cache", "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "output_attentions",
    "output_hidden_states", "gradient_checkpointing", "keys_to_ignore_at_inference", "id2label", "label2id",
    "num_labels", "problem_type", "finetuning_task", "task_specific_params", "classifier_dropout",
    "cross_attention_hidden_size", "original_max_position_embeddings",
    # restate what layer_types or no_rope_layers say, once those are read
    "_sliding_window_pattern", "no_rope_layer_interval",
})
RESTATED = ("layer_types", "hidden_act", "hidden_activation")  # compared with what the family reads
WINDOW_KEYS = ("sliding_window_size", "max_window_layers")  # mean nothing else, and no window is switched on
ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "mscale", "mscale_all_dim", "truncate"}),
}
REQUIRED_ROPE_KEYS = {"factor", "low_freq_factor", "high_freq_factor"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_new": "gelu_tanh", "relu": "relu"}
LAYER_TYPES = ("full_attention", "sliding_attention")


def from_hf(raw: Raw, eos: Any = None) -> ModelConfig:
    """`ModelConfig` of a config.json's content; `eos` adds generation_config.json's eos_token_id (int, list or null).

    The text part of a multimodal config is read where its family is known. An unknown model_type, an unsupported
    option, or a key that no list knows raises ValueError naming it.
    """
    raw = _text_part(raw)
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; there are {', '.join(sorted(FAMILIES))}")
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key) or {}, dict):
            raise ValueError(f"config.json: {key} = {raw[key]!r}: expected an object")
    reader, keys = FAMILIES[model_type]
    _check_keys(raw, model_type, keys)
    _check_restated(raw)
    fields = _common(raw, hf := _hf_config(raw, model_type)) | reader(raw, hf)
    _check_layer_types(raw, fields["windows"], reads_them="layer_types" in keys)
    ids = set(_ids(eos)) | set(_ids(raw.get("eos_token_id", hf.eos_token_id)))
    return ModelConfig(model_type=model_type, eos_token_ids=tuple(sorted(ids)),
                       hf_json=json.dumps(raw, sort_keys=True), **fields)


def _text_part(raw: Raw) -> Raw:
    text = raw.get("text_config")
    if raw.get("model_type") in FAMILIES or not isinstance(text, dict) or text.get("model_type") not in FAMILIES:
        return raw
    shared = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id", "quantization_config") if key in raw}
    return shared | text


def _check_keys(raw: Raw, model_type: str, keys: frozenset[str]) -> None:
    """Refuse a key that is read by nobody, unless it cannot matter or has a neutral value."""
    problems = []
    for key, value in sorted(raw.items()):
        if key in BASE or key in keys or key in INERT or value is None:
            continue
        if key in RESTATED or (key in WINDOW_KEYS and "sliding_window" in keys and not raw.get("use_sliding_window")):
            continue
        if key not in NEUTRAL:
            problems.append(f"{key} = {value!r} (unknown key)")
        elif value not in NEUTRAL[key]:
            problems.append(f"{key} = {value!r} (supported: {', '.join(map(repr, NEUTRAL[key])) or 'null'})")
    if problems:
        raise ValueError(f"config.json of model_type {model_type}: unsupported " + "; ".join(problems))


def _check_restated(raw: Raw) -> None:
    """Two spellings of one thing must agree, and what switches nothing on must not pretend to."""
    pairs = [("hidden_act", "hidden_activation"), ("num_experts", "num_local_experts"),
             ("sliding_window", "sliding_window_size"), ("sliding_window_pattern", "_sliding_window_pattern")]
    for one, other in pairs:
        if raw.get(one) is not None and raw.get(other) is not None and raw[one] != raw[other]:
            raise ValueError(f"config.json: {one} = {raw[one]!r} contradicts {other} = {raw[other]!r}")
    rope = raw.get("rope_parameters") or {}
    full, sliding = (rope.get(kind) or rope for kind in LAYER_TYPES)
    for key, entry, name in [("rope_theta", full, "rope_theta"), ("rope_local_base_freq", sliding, "rope_theta"),
                             ("partial_rotary_factor", full, "partial_rotary_factor"),
                             ("original_max_position_embeddings", full, "original_max_position_embeddings")]:
        if raw.get(key) is not None and entry.get(name) is not None and raw[key] != entry[name]:
            raise ValueError(f"config.json: {key} = {raw[key]!r} contradicts rope_parameters: {name} = {entry[name]!r}")
    if rope and raw.get("rope_scaling") and _scaling(full) != _scaling(raw["rope_scaling"]):
        raise ValueError(f"config.json: rope_scaling = {raw['rope_scaling']!r} contradicts rope_parameters = {rope!r}")


def _scaling(entry: Raw) -> Raw:
    """A RoPE entry by its newer spelling, without the base."""
    kind = {"rope_type": entry.get("rope_type") or entry.get("type") or "default"}
    return kind | {key: value for key, value in entry.items() if key not in ("type", "rope_type", "rope_theta")}


def _check_layer_types(raw: Raw, windows: tuple[int, ...], reads_them: bool) -> None:
    named = raw.get("layer_types")
    if named is None or reads_them:
        return
    derived = ["sliding_attention" if window else "full_attention" for window in windows]
    if list(named) != derived:
        raise ValueError(f"config.json: layer_types = {named!r}, where this family has {derived!r}")


def _hf_config(raw: Raw, model_type: str) -> Any:
    """transformers' config object of the family: defaults filled in, old spellings translated."""
    from transformers import CONFIG_MAPPING  # a second and a half to import: not paid by who only needs the names

    _check_rope_types(raw, model_type)
    values = {key: value for key, value in raw.items() if not (value is None and key == "rope_theta")}
    if model_type in ("gemma2", "gemma3_text"):
        values.setdefault("hidden_activation", raw.get("hidden_act") or "gelu_pytorch_tanh")
    elif "hidden_activation" in raw:
        values.setdefault("hidden_act", raw["hidden_activation"])
    try:
        return CONFIG_MAPPING[model_type](**copy.deepcopy(values))
    except (StrictDataclassError, KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"config.json of model_type {model_type}: {error}") from error


def _check_rope_types(raw: Raw, model_type: str) -> None:
    """Refuse an unsupported RoPE by name before transformers rewrites or complains about it."""
    for source in ("rope_parameters", "rope_scaling"):
        given = raw.get(source) or {}
        nested = [value for value in given.values() if isinstance(value, dict)] or [given]
        for entry in nested:
            kind = _scaling(entry)["rope_type"]
            if kind not in ROPE_KEYS or (model_type == "phi3" and kind != "default"):
                known = "default" if model_type == "phi3" else ", ".join(ROPE_KEYS)
                raise ValueError(f"config.json: {source} of type {kind!r} is not supported for {model_type}; "
                                 f"there are {known}")


def _rope(hf: Any, entry: Raw, head_dim: int) -> Rope:
    """One entry of rope_parameters, as transformers standardised it."""
    kind = entry.get("rope_type", "default")
    unknown = {key: value for key, value in entry.items() if value is not None and key not in ROPE_KEYS[kind]}
    for key in ("rope_type", "type", "rope_theta"):
        unknown.pop(key, None)
    if unknown.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor = {entry['partial_rotary_factor']} is not supported")
    if unknown:
        raise ValueError(f"config.json: RoPE type {kind} does not read {', '.join(sorted(unknown))}")
    missing = [key for key in sorted(ROPE_KEYS[kind] & REQUIRED_ROPE_KEYS) if entry.get(key) is None]
    if missing or entry.get("rope_theta") is None:
        raise ValueError(f"config.json: RoPE type {kind} lacks {', '.join(missing) or 'rope_theta'}")
    numbers: Raw = {"factor": float(entry["factor"])} if kind != "default" else {}
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        numbers["original_max_position"] = int(
            getattr(hf, key, None) or entry.get(key) or hf.max_position_embeddings)
    if kind == "llama3":
        numbers |= {key: float(entry[key]) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        numbers |= {"beta_fast": float(entry.get("beta_fast") or 32), "beta_slow": float(entry.get("beta_slow") or 1),
                    "truncate": bool(entry.get("truncate", True)), "attention_factor": _yarn_attention_factor(entry)}
    return Rope(theta=float(entry["rope_theta"]), dim=head_dim, kind=kind, **numbers)


def _yarn_attention_factor(entry: Raw) -> float:
    """0.1 ln(factor) + 1, or the quotient by mscale and mscale_all_dim where both are given."""
    if entry.get("attention_factor") is not None:
        return float(entry["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if entry["factor"] <= 1 else 0.1 * weight * math.log(entry["factor"]) + 1.0

    if entry.get("mscale") and entry.get("mscale_all_dim"):
        return scale(entry["mscale"]) / scale(entry["mscale_all_dim"])
    return scale(1.0)


def _ids(value: Any) -> list[int]:
    return [] if value is None else [int(one) for one in (value if isinstance(value, list) else [value])]


def _activation(hf: Any) -> str:
    name = hf.hidden_activation if hasattr(hf, "hidden_activation") else hf.hidden_act
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json: activation {name!r} is not supported; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _common(raw: Raw, hf: Any) -> Raw:
    """What all families share: sizes, one RoPE on every layer, full attention."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    nested = any(isinstance(value, dict) for value in hf.rope_parameters.values())
    if nested and hf.model_type != "gemma3_text":
        raise ValueError(f"config.json: rope_parameters by layer type are not supported for {hf.model_type}")
    return {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": hf.intermediate_size,
        "norm_eps": float(hf.rms_norm_eps),
        "tied": bool(hf.tie_word_embeddings),
        "max_position_embeddings": hf.max_position_embeddings,
        "attention_scale": head_dim**-0.5,
        "activation": _activation(hf),
        "initializer_range": float(hf.initializer_range),
        "windows": (0,) * hf.num_hidden_layers,
        "ropes": () if nested else (_rope(hf, hf.rope_parameters, head_dim),),
        "rope_ids": (0,) * hf.num_hidden_layers,
    }


def _everywhere(hf: Any) -> tuple[int, ...]:
    """The same window on every layer; null = none."""
    if hf.sliding_window is not None and hf.sliding_window <= 0:
        raise ValueError(f"config.json: sliding_window = {hf.sliding_window} must be positive, or null for none")
    return (hf.sliding_window or 0,) * hf.num_hidden_layers


def _by_layer_type(hf: Any) -> tuple[int, ...]:
    """A window on the layers named sliding_attention."""
    if len(hf.layer_types) != hf.num_hidden_layers or not set(hf.layer_types) <= set(LAYER_TYPES):
        raise ValueError(f"config.json: layer_types = {hf.layer_types!r} must name one of {', '.join(LAYER_TYPES)} "
                         f"for each of {hf.num_hidden_layers} layers")
    if "sliding_attention" in hf.layer_types and not hf.sliding_window:
        raise ValueError(f"config.json: layer_types has sliding_attention, but sliding_window = {hf.sliding_window!r}")
    return tuple(hf.sliding_window if kind == "sliding_attention" else 0 for kind in hf.layer_types)


def _llama(raw: Raw, hf: Any) -> Raw:
    return {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


def _mistral(raw: Raw, hf: Any) -> Raw:
    return {"windows": _everywhere(hf)}


def _qwen2(raw: Raw, hf: Any) -> Raw:
    return {"qkv_bias": True, "windows": _by_layer_type(hf)}


def _qwen3(raw: Raw, hf: Any) -> Raw:
    return {"qk_norm": "head", "qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias,
            "windows": _by_layer_type(hf)}


def _qwen3_moe(raw: Raw, hf: Any) -> Raw:
    return {
        "qk_norm": "head", "qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias, "windows": _everywhere(hf),
        "num_experts": hf.num_local_experts, "experts_per_token": hf.num_experts_per_tok,
        "expert_intermediate_size": hf.moe_intermediate_size, "norm_topk_prob": bool(hf.norm_topk_prob),
    }


def _smollm3(raw: Raw, hf: Any) -> Raw:
    if len(hf.no_rope_layers) < hf.num_hidden_layers:
        raise ValueError(f"config.json: no_rope_layers has {len(hf.no_rope_layers)} entries "
                         f"for {hf.num_hidden_layers} layers")
    used = hf.no_rope_layers[: hf.num_hidden_layers]
    windows = _by_layer_type(hf) if hf.use_sliding_window else (0,) * hf.num_hidden_layers
    return {
        "qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias, "windows": windows,
        "rope_ids": tuple(0 if flag else -1 for flag in used),
    }


def _olmo2(raw: Raw, hf: Any) -> Raw:
    return {"norms": "post", "qk_norm": "full", "qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}


def _gemma(hf: Any) -> Raw:
    return {
        "norms": "both", "unit_offset_norm": True, "embed_scale": hf.hidden_size**0.5,
        "attention_scale": hf.query_pre_attn_scalar**-0.5, "qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias,
        "logits_softcap": float(hf.final_logit_softcapping or 0), "windows": _by_layer_type(hf),
    }


def _gemma2(raw: Raw, hf: Any) -> Raw:
    return _gemma(hf) | {"attention_softcap": float(hf.attn_logit_softcapping or 0)}


def _gemma3(raw: Raw, hf: Any) -> Raw:
    unknown = hf.rope_parameters.keys() - set(LAYER_TYPES)
    if unknown:
        raise ValueError(f"config.json: rope_parameters of gemma3_text are given by layer type "
                         f"({', '.join(LAYER_TYPES)}), not as {', '.join(sorted(unknown))}")
    ropes = tuple(_rope(hf, hf.rope_parameters[kind], hf.head_dim) for kind in LAYER_TYPES)
    return _gemma(hf) | {"qk_norm": "head", "ropes": ropes,
                         "rope_ids": tuple(LAYER_TYPES.index(kind) for kind in hf.layer_types)}


ACT, GELU, WINDOW = {"hidden_act"}, {"hidden_activation"}, {"sliding_window"}
SWITCHED = WINDOW | {"use_sliding_window", "max_window_layers", "layer_types"}
GEMMA = GELU | WINDOW | {"layer_types", "attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"}
FAMILIES: dict[str, tuple[Callable[[Raw, Any], Raw], frozenset[str]]] = {
    "llama": (_llama, frozenset(ACT | {"attention_bias", "mlp_bias"})),
    "mistral": (_mistral, frozenset(ACT | WINDOW)),
    "qwen2": (_qwen2, frozenset(ACT | SWITCHED)),
    "qwen3": (_qwen3, frozenset(ACT | SWITCHED | {"attention_bias"})),
    "qwen3_moe": (_qwen3_moe, frozenset(ACT | WINDOW | {
        "use_sliding_window", "attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok",
        "moe_intermediate_size", "norm_topk_prob"})),
    "smollm3": (_smollm3, frozenset(ACT | WINDOW | {
        "use_sliding_window", "layer_types", "no_rope_layers", "attention_bias", "mlp_bias"})),
    "olmo2": (_olmo2, frozenset(ACT | {"attention_bias"})),
    "phi3": (_mistral, frozenset(ACT | WINDOW)),
    "gemma2": (_gemma2, frozenset(GEMMA | {"attn_logit_softcapping"})),
    "gemma3_text": (_gemma3, frozenset(GEMMA | {"sliding_window_pattern", "rope_local_base_freq"})),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
