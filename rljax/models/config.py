"""The one description of a decoder: every number that the computation depends on, frozen and hashable."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
NORM_LAYOUTS = ("pre", "post", "both")
QK_NORMS = ("none", "head", "full")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one kind of layer; dimension i turns together with i + dim/2.

    kind: default, linear (all frequencies divided by `factor`), llama3 (three bands), yarn (ramp between
    interpolated and extrapolated frequencies, arXiv 2309.00071). cos and sin are multiplied by attention_factor.
    """

    theta: float
    dim: int  # turned dimensions of a head
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0  # tokens; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole numbers as the ramp's ends
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"RoPE kind {self.kind!r} is not supported; there are {', '.join(ROPE_KINDS)}")
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"RoPE needs an even, positive number of dimensions, not {self.dim}")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"RoPE theta and factor must be positive, not {self.theta} and {self.factor}")
        if self.kind in ("llama3", "yarn") and self.original_max_position <= 0:
            raise ValueError(f"RoPE kind {self.kind} needs original_max_position_embeddings")

    def inv_freq(self) -> np.ndarray:
        """Turn per position of each pair of dimensions, [dim/2] float32, radians."""
        inverse = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        elif self.kind == "yarn":
            inverse = self._yarn(inverse)
        return inverse.astype(np.float32)

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        """Short waves stay, long waves are stretched by `factor`, between them a linear blend in turns."""
        turns = self.original_max_position * inverse / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return (1 - blend) * inverse / self.factor + blend * inverse

    def _yarn(self, inverse: np.ndarray) -> np.ndarray:
        """Dimensions that turn more than beta_fast times stay, less than beta_slow are stretched, a ramp between."""

        def dimension(turns: float) -> float:
            return self.dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low if high != low else 0.001  # the reference's guard against a ramp without width
        stretched = np.clip((np.arange(self.dim // 2) - low) / width, 0.0, 1.0)
        return inverse / self.factor * stretched + inverse * (1 - stretched)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder. Two configs that compute the same from the same parameters compare equal and hash alike."""

    model_type: str  # the HF family: decides tensor names and config.json
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    tied: bool  # the head is the embedding itself
    max_position_embeddings: int  # tokens
    attention_scale: float  # multiplies the scores
    windows: tuple[int, ...]  # per layer, keys seen, own included; 0 = all
    ropes: tuple[Rope, ...]
    rope_ids: tuple[int, ...]  # per layer, index into ropes; -1 = no RoPE
    attention_softcap: float = 0.0  # 0 = off
    logits_softcap: float = 0.0  # 0 = off
    embed_scale: float = 1.0  # multiplies embeddings, after rounding to the compute dtype
    unit_offset_norm: bool = False  # norms scale by 1 + w
    norms: str = "pre"  # pre, post or both sides of attention and MLP
    qk_norm: str = "none"  # none, head (each head alone) or full (all heads together)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    num_experts: int = 0  # 0 = dense MLP
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk_prob: bool = False  # chosen experts' weights sum to 1
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    hf_json: str = dataclasses.field(default="", compare=False, repr=False)  # the config.json it was read from

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        for name, value, known in (("norms", self.norms, NORM_LAYOUTS), ("qk_norm", self.qk_norm, QK_NORMS),
                                   ("activation", self.activation, ACTIVATIONS)):
            if value not in known:
                raise ValueError(f"{name} {value!r} is not supported; there are {', '.join(known)}")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} of num_experts {self.num_experts}")

    def _check_layers(self) -> None:
        for name in ("windows", "rope_ids"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers")
        if min(self.windows) < 0:
            raise ValueError(f"a window must be 0 (full) or positive, not {min(self.windows)}")
        if not -1 <= min(self.rope_ids) <= max(self.rope_ids) < len(self.ropes):
            raise ValueError(f"rope_ids reach from {min(self.rope_ids)} to {max(self.rope_ids)}, "
                             f"with {len(self.ropes)} ropes")
        for rope in self.ropes:
            if rope.dim != self.head_dim:
                raise ValueError(f"RoPE over {rope.dim} of {self.head_dim} head dimensions (partial rotary) "
                                 "is not supported")
