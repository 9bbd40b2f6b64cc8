"""The decoder against the golden models, and every option of a config.json either read or refused."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import NAMES, golden, loaded, raw_config, run
from shared_data import cases

from rljax import models, ops
from rljax.models import decoder, moe, names
from rljax.models.config import Rope
from rljax.models.families import FAMILIES, from_hf

LOADING = {row["id"]: row for row in cases("model_loading")}


def by_quantity(quantity: str) -> list:
    rows = [row for row in LOADING.values() if row["input"].get("quantity") == quantity]
    return [pytest.param(row["input"], row["expected"], id=row["id"]) for row in rows]


def close(value, expected) -> None:
    np.testing.assert_allclose(value, expected["value"], rtol=expected["rtol"], atol=expected["atol"])


# --- golden models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_golden_ones(name):
    cfg, params = loaded(name)
    data = golden(name)
    np.testing.assert_allclose(run(cfg, params, data["input_ids"]), data["logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_mixed_length(name):
    cfg, params = loaded(name)
    data = golden(name)
    out = run(cfg, params, data["var_input_ids"], data["var_attention_mask"])
    valid = data["var_attention_mask"].astype(bool)
    np.testing.assert_allclose(out[valid], data["var_logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation(name):
    """Forcing the golden tokens, each of them must be the argmax: by induction that is greedy decoding."""
    cfg, params = loaded(name)
    data = golden(name)
    tokens = np.concatenate([data["input_ids"], data["greedy_ids"]], axis=1)
    out = run(cfg, params, tokens)
    np.testing.assert_array_equal(out[:, 16:-1].argmax(-1), data["greedy_ids"])


def test_packed_segments_equal_each_alone():
    cfg, params = loaded("qwen3")
    data = golden("qwen3", "packed.npz")
    tokens, segments, positions = (np.atleast_2d(data[key]) for key in ("input_ids", "segment_ids", "position_ids"))
    out = run(cfg, params, tokens, segments, positions)[0]
    np.testing.assert_allclose(out[segments[0] == 1], data["logits_a"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(out[segments[0] == 2], data["logits_b"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma2"])
def test_neighbours_in_a_row_change_nothing(name):
    cfg, params = loaded(name)
    tokens = golden(name)["input_ids"]
    segments = np.where(np.arange(17) < 9, 1, 2) * np.ones((3, 1), int)
    segments[:, 15:] = 0
    positions = np.where(np.arange(17) < 9, np.arange(17), np.arange(17) - 9) * np.ones((3, 1), int)
    other = tokens.copy()
    other[:, 9:] = (other[:, 9:] + 7) % cfg.vocab_size
    out, changed = (run(cfg, params, ids, segments, positions) for ids in (tokens, other))
    np.testing.assert_array_equal(out[:, :9], changed[:, :9])
    assert np.isfinite(changed).all() and np.abs(out[:, 9:15] - changed[:, 9:15]).max() > 0.01


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_a_layer_over_slots_is_the_layer_over_rows():
    cfg, params = loaded("gemma3_text")
    weights = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = jax.random.normal(jax.random.key(0), (2, 3, cfg.hidden_size))
    cos, sin = decoder.rope_tables(cfg, jnp.arange(6).reshape(2, 3))

    def attend(q, k, v, window):
        assert window == 5
        return q + jnp.repeat(k + v, cfg.num_heads // cfg.num_kv_heads, axis=-2)

    rows = decoder.layer(cfg, decoder.LayerKind(5, cos[1], sin[1]), weights, x, attend)
    slots = decoder.LayerKind(5, cos[1].reshape(6, -1), sin[1].reshape(6, -1))
    flat = decoder.layer(cfg, slots, weights, x.reshape(6, -1), attend)
    np.testing.assert_allclose(flat.reshape(rows.shape), rows, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "smollm3"])
def test_remat_gives_the_same_gradients(name):
    cfg, params = loaded(name)
    tokens = golden(name)["input_ids"][:1, :8].astype(np.int32)
    positions, segments = np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.int32)

    @jax.jit
    def gradients(params):
        def loss(params, remat):
            return jnp.sum(models.forward(cfg, params, tokens, positions, segments, remat=remat)[..., 0] ** 2)

        return [jax.grad(loss)(params, remat) for remat in ("full", "dots", "none")]

    full, dots, plain = gradients(params)
    for path in names.leaves(cfg):
        one, two, other = (names.lookup(tree, path) for tree in (full, dots, plain))
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(two, other, atol=1e-4, rtol=1e-4)
        assert path == ("lm_head",) or float(jnp.abs(other).max()) > 0, f"no gradient reaches {path}"


def test_tied_head_is_the_embedding():
    cfg, params = loaded("llama_tied")
    assert decoder.head_weight(cfg, params) is params["embed"] and "lm_head" not in params


def test_compute_dtype_of_hidden_states_and_logits():
    cfg, params = loaded("llama_tied")
    tokens = np.ones((1, 4), np.int32)
    hidden = models.forward(cfg, params, tokens, np.arange(4)[None], tokens, dtype=jnp.bfloat16)
    out = models.logits(cfg, params, hidden)
    assert hidden.dtype == jnp.bfloat16 and out.dtype == jnp.float32
    np.testing.assert_allclose(out[0], run(cfg, params, tokens)[0], atol=0.15)


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_equal_a_loop_over_tokens(normalize):
    keys = jax.random.split(jax.random.key(1), 5)
    experts, width, inner = 5, 6, 4
    params = {
        "router": jax.random.normal(keys[0], (width, experts)),
        "gate_proj": jax.random.normal(keys[1], (experts, width, inner)),
        "up_proj": jax.random.normal(keys[2], (experts, width, inner)),
        "down_proj": jax.random.normal(keys[3], (experts, inner, width)),
    }
    x = jax.random.normal(keys[4], (2, 3, width))
    out = np.asarray(moe.mlp(params, x, jax.nn.silu, 2, normalize)).reshape(-1, width)
    for token, result in zip(np.asarray(x).reshape(-1, width), out, strict=True):
        probabilities = np.asarray(jax.nn.softmax(token @ params["router"]))
        best = np.argsort(-probabilities)[:2]
        weights = probabilities[best] / (probabilities[best].sum() if normalize else 1)
        expected = sum(
            weight * ((jax.nn.silu(token @ params["gate_proj"][e]) * (token @ params["up_proj"][e]))
                      @ params["down_proj"][e])
            for weight, e in zip(weights, best, strict=True)
        )
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_specs_describe_the_loaded_parameters(name):
    cfg, params = loaded(name)
    drawn = jax.eval_shape(lambda key: models.init(cfg, key), jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, drawn) == jax.tree.map(lambda leaf: leaf.shape, params)
    for path, spec in names.leaves(cfg).items():
        assert names.lookup(params, path).shape == spec.shape
        assert len(spec.axes) == len(spec.shape)


def test_init_draws_matrices_and_leaves_norms_neutral():
    for name in ("gemma2", "llama_tied"):
        cfg, _ = loaded(name)
        params = models.init(cfg, jax.random.key(0), jnp.bfloat16)
        assert params["embed"].dtype == jnp.bfloat16
        assert abs(float(params["embed"].astype(jnp.float32).std()) - cfg.initializer_range) < 0.002
        assert (params["final_norm"] == (0 if cfg.unit_offset_norm else 1)).all()
        assert not (params["layers"]["q_proj"] == params["layers"]["o_proj"].reshape(params["layers"]["q_proj"].shape)
                    ).all()


# --- RoPE ------------------------------------------------------------------------------------------------------------


def llama_raw(**changes):
    return raw_config("llama_tied") | changes


@pytest.mark.parametrize("given, expected", by_quantity("rope_inv_freq"))
def test_case_rope_inv_freq(given, expected):
    args = given["args"]
    scaling = args.get("scaling") or {"rope_type": "default"}
    parameters = scaling | {"rope_theta": args["theta"]}
    raw = {key: value for key, value in llama_raw(head_dim=args["head_dim"]).items() if key != "rope_parameters"}
    new = from_hf(raw | {"rope_parameters": parameters})
    old = from_hf(raw | {"rope_theta": args["theta"], "rope_scaling": args.get("scaling")})
    assert new == old
    close(new.ropes[0].inv_freq()[args["indices"]], expected)


@pytest.mark.parametrize("given, expected", by_quantity("apply_rope"))
def test_case_rotary_layout(given, expected):
    args = given["args"]
    x = jnp.asarray(args["x"], jnp.float32)[None]
    angle = args["position"] * Rope(args["theta"], x.shape[-1]).inv_freq()
    close(decoder.apply_rope(x, jnp.cos(angle), jnp.sin(angle))[0], expected)


def test_linear_rope_divides_all_frequencies():
    plain, linear = Rope(100.0, 8), Rope(100.0, 8, kind="linear", factor=4.0)
    np.testing.assert_allclose(linear.inv_freq() * 4, plain.inv_freq(), rtol=1e-6)


def test_yarn_ramp_by_hand():
    rope = Rope(10000.0, 8, kind="yarn", factor=4.0, original_max_position=64)
    # The ramp's ends, 8 ln(64 / (2 pi turns)) / (2 ln 10000): for 32 turns -0.497, floor -1, at least 0; for one turn
    # 1.008, ceil 2.
    base = np.array([1.0, 0.1, 0.01, 0.001])
    stretched = np.array([0.0, 0.5, 1.0, 1.0])
    np.testing.assert_allclose(rope.inv_freq(), base / 4 * stretched + base * (1 - stretched), rtol=1e-6)


@pytest.mark.parametrize("extra, factor", [
    ({}, 0.1 * math.log(4) + 1), ({"attention_factor": 1.25}, 1.25),
    ({"mscale": 0.7, "mscale_all_dim": 1.4}, (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1)),
])
def test_yarn_attention_factor_multiplies_both_tables(extra, factor):
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4} | extra
    cfg = from_hf(llama_raw(rope_parameters=entry))
    assert cfg.ropes[0].attention_factor == pytest.approx(factor)
    cos, sin = decoder.rope_tables(cfg, jnp.zeros((2,), jnp.int32))
    np.testing.assert_allclose(cos, factor, rtol=1e-6)
    np.testing.assert_array_equal(sin, 0)


def test_layers_without_rope_use_the_identity_table():
    cfg, _ = loaded("smollm3")
    cos, sin = decoder.rope_tables(cfg, jnp.arange(5))
    _, tables = decoder.layer_tables(cfg)
    assert tables.tolist() == [0, 0, 1, 0]
    assert (cos[1] == 1).all() and (sin[1] == 0).all() and not (cos[0] == 1).all()


# --- the other cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, expected", by_quantity("projection_shapes"))
def test_case_projection_shapes(given, expected):
    for family in ("llama", "qwen3"):
        cfg = from_hf({"model_type": family, "tie_word_embeddings": True} | given["args"]["config"])
        table, value = names.pieces(cfg), expected["value"]
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shape = names.tensor_shape(table[f"model.layers.0.self_attn.{projection}.weight"])
            assert list(shape) == value[projection]
        assert cfg.attention_scale == pytest.approx(value["scale"], rel=expected["rtol"])


@pytest.mark.parametrize("given, expected", by_quantity("windowed_layers"))
def test_case_windowed_layers(given, expected):
    for family in ("qwen2", "qwen3"):
        cfg = from_hf({"model_type": family} | given["args"]["config"])
        assert [i for i, window in enumerate(cfg.windows) if window] == expected["value"]


@pytest.mark.parametrize("given, expected", by_quantity("keys_seen"))
def test_case_keys_seen(given, expected):
    args = given["args"]
    length = args["seq"]
    q = k = jnp.zeros((1, length, 1, length))
    v = jnp.eye(length)[None, :, None, :]
    out = ops.attention(q, k, v, jnp.ones((1, length), jnp.int32), args["window"], scale=1.0)
    assert np.nonzero(np.asarray(out)[0, args["query"], 0])[0].tolist() == expected["value"]


@pytest.mark.parametrize("given, expected", by_quantity("unit_offset_norm_scale"))
def test_case_norm_scale_of_gemma(given, expected):
    cfg, _ = loaded("gemma2")
    stored = jnp.asarray(given["args"]["stored"])
    out = decoder.rms_norm(dataclasses.replace(cfg, norm_eps=0.0), jnp.ones(stored.shape), stored)
    close(out, expected)


@pytest.mark.parametrize("given, expected", by_quantity("embedding_scale"))
def test_case_embedding_scale(given, expected):
    dtype = jnp.dtype(given["args"]["dtype"])
    scales = []
    for size in given["args"]["hidden_sizes"]:
        cfg = from_hf(raw_config("gemma2") | {"hidden_size": size})
        scales.append(float(decoder.embed(cfg, {"embed": jnp.ones((1, 1))}, jnp.zeros((), int), dtype)[0]))
    close(scales, expected)


@pytest.mark.parametrize("given, expected", by_quantity("softcap"))
def test_case_softcap(given, expected):
    cfg = from_hf(raw_config("gemma2") | {"final_logit_softcapping": given["args"]["cap"]})
    out = models.logits(cfg, {"embed": jnp.ones((1, 1))}, jnp.asarray(given["args"]["x"])[:, None])
    close(out[:, 0], expected)
    off = from_hf(raw_config("gemma2") | {"final_logit_softcapping": None, "attn_logit_softcapping": None})
    assert (off.logits_softcap, off.attention_softcap) == (0.0, 0.0)


def test_every_case_row_has_a_test():
    here = {"rope_inv_freq", "apply_rope", "projection_shapes", "windowed_layers", "keys_seen",
            "unit_offset_norm_scale", "embedding_scale", "softcap"}
    elsewhere = {"LOD-004", "LOD-006", "LOD-007"}  # test_hf.py
    left = [row for row in LOADING.values() if row["input"].get("quantity") not in here and row["id"] not in elsewhere]
    assert not left


# --- reading config.json ---------------------------------------------------------------------------------------------

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
         "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
         "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
         "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
         "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936}
LLAMA32 = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
           "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
           "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
           "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
           "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
               "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"},
           "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
           "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256}
REAL = {  # name -> (config.json as published, in its old spelling; what must come out)
    "Qwen3-0.6B": (QWEN3, {"head_dim": 128, "tied": True, "qk_norm": "head", "norm_eps": 1e-6}),
    "Llama-3.2-1B": (LLAMA32, {"eos_token_ids": (128001, 128008, 128009), "windows": (0,) * 16}),
    "SmolLM2-135M": (
        {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
         "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
         "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
         "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49152,
         "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "transformers.js_config": {"dtype": "q4"}},
        {"head_dim": 64}),
    "Qwen2.5-0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
         "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
         "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
         "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936, "attention_dropout": 0.0},
        {"qkv_bias": True, "o_bias": False, "windows": (0,) * 24}),
    "Qwen3-30B-A3B": (
        QWEN3 | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128,
                 "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
                 "max_window_layers": 48, "output_router_logits": False, "router_aux_loss_coef": 0.001},
        {"num_experts": 128, "experts_per_token": 8, "norm_topk_prob": True}),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000}, {"windows": (4096,) * 32}),
    "Mistral-7B-v0.3": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
         "sliding_window": None, "vocab_size": 32768, "head_dim": 128}, {"windows": (0,) * 32}),
    "SmolLM3-3B": (
        {"model_type": "smollm3", "num_hidden_layers": 36, "max_window_layers": 28, "use_sliding_window": False,
         "sliding_window": None, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
         "layer_types": ["full_attention"] * 36, "pretraining_tp": 2, "rope_theta": 5000000.0, "mlp_bias": False},
        {"rope_ids": (0, 0, 0, -1) * 9, "tied": True}),
    "OLMo-2-1B": (
        {"model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
         "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 500000,
         "vocab_size": 100352, "attention_bias": False, "pad_token_id": 100277}, {"norms": "post", "qk_norm": "full"}),
    "Phi-3-mini-4k": (
        {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0,
         "resid_pdrop": 0.0, "hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32,
         "original_max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047,
         "attention_bias": False, "rms_norm_eps": 1e-05}, {"windows": (2047,) * 32}),
    "gemma-2-2b": (
        {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
         "cache_implementation": "hybrid", "num_hidden_layers": 26, "sliding_window": 4096,
         "sliding_window_size": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0}, {"windows": (4096, 0) * 13, "attention_softcap": 50.0, "tied": True}),
    "gemma-3-1b": (
        {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "rope_local_base_freq": 10000,
         "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
         "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid"},
        {"windows": ((512,) * 5 + (0,)) * 4 + (512, 512), "ropes": (Rope(1e6, 256), Rope(1e4, 256))}),
    "gemma-3-4b": (
        {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256,
         "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 6,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
        {"model_type": "gemma3_text", "ropes": (Rope(1e6, 256, kind="linear", factor=8.0), Rope(1e4, 256))}),
}


@pytest.mark.parametrize("name", REAL)
def test_published_configs_are_read(name):
    raw, expected = REAL[name]
    cfg = from_hf(raw)
    assert {key: getattr(cfg, key) for key in expected} == expected
    hash(cfg)


@pytest.mark.parametrize("family, changes, named", [
    ("llama_tied", {"model_type": "gpt_neox"}, ["gpt_neox", "qwen3_moe"]),
    ("llama_tied", {"model_type": None}, ["None"]),
    ("llama_tied", {"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
    ("llama_tied", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ("llama_tied", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ("llama_tied", {"some_new_option": 3}, ["some_new_option", "3"]),
    ("llama_tied", {"some_new_switch": False}, ["some_new_switch"]),
    ("llama_tied", {"sliding_window": 16}, ["sliding_window", "16"]),
    ("llama_tied", {"num_experts": 8}, ["num_experts"]),
    ("llama_tied", {"hidden_act": "relu6"}, ["relu6", "silu"]),
    ("llama_tied", {"rms_norm_eps": None}, ["rms_norm_eps"]),
    ("llama_tied", {"hidden_size": "wide"}, ["hidden_size"]),
    ("llama_tied", {"num_key_value_heads": 3}, ["num_kv_heads", "3"]),
    ("llama_tied", {"layer_types": ["sliding_attention"] * 3}, ["layer_types"]),
    ("llama_tied", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
    ("llama_tied", {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, ["su"]),
    ("llama_tied", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["linear", "factor"]),
    ("llama_tied", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}}, ["factor"]),
    ("llama_tied", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary"]),
    ("llama_tied", {"rope_theta": 77.0}, ["rope_theta", "77.0", "5000"]),
    ("llama_tied", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "rope_parameters"]),
    ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["longrope"]),
    ("phi3", {"resid_pdrop": 0.1}, ["resid_pdrop"]),
    ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
    ("mistral", {"attention_bias": True}, ["attention_bias"]),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0,
               "layer_types": ["sliding_attention"] * 2}, ["sliding_window"]),
    ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "2"]),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
    ("qwen3_moe", {"mlp_only_layers": [0]}, ["mlp_only_layers"]),
    ("qwen3_moe", {"decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
    ("qwen3_moe", {"num_experts": 4}, ["num_experts", "num_local_experts", "4", "8"]),
    ("qwen3_moe", {"num_experts_per_tok": 9}, ["9", "8"]),
    ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "2", "4"]),
    ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    ("gemma2", {"hidden_act": "gelu"}, ["hidden_act", "hidden_activation"]),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ["rope_parameters"]),
])
def test_unsupported_options_are_named(family, changes, named):
    with pytest.raises(ValueError) as error:
        from_hf(raw_config(family) | changes)
    assert all(word in str(error.value) for word in named), str(error.value)


def test_old_and_new_spellings_agree():
    new = raw_config("qwen3_moe")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "num_local_experts", "dtype")}
    old |= {"rope_theta": 20000.0, "num_experts": 8, "torch_dtype": "float32"}
    assert from_hf(old) == from_hf(new)
    new = raw_config("gemma3_text")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    assert from_hf(old | {"rope_theta": 200000.0, "rope_local_base_freq": 1000.0}) == from_hf(new)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_absent_keys_take_the_defaults_of_transformers(family):
    from transformers import CONFIG_MAPPING

    hf = CONFIG_MAPPING[family]()
    cfg = from_hf({"model_type": family})
    assert (cfg.vocab_size, cfg.hidden_size, cfg.num_layers) == (hf.vocab_size, hf.hidden_size, hf.num_hidden_layers)
    assert (cfg.norm_eps, cfg.tied) == (hf.rms_norm_eps, hf.tie_word_embeddings)


def test_sliding_layers_begin_at_max_window_layers():
    raw = raw_config("qwen2") | {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    assert from_hf(raw).windows == (0, 8)


def test_one_program_for_equal_configs():
    """The file's own text is not part of the config's identity: another spelling costs no compilation."""
    raw = raw_config("llama_tied")
    one, other = from_hf(raw), from_hf(raw | {"transformers_version": "4.0", "pretraining_tp": 2})
    assert one == other and hash(one) == hash(other) and one.hf_json != other.hf_json
