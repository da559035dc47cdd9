"""skytrain's family `modern` for transformers (4.57 and 5), as remote code: load it with `trust_remote_code=True`.

nanochat's transformer (github.com/karpathy/nanochat): RMSNorm without weights, rotary positions, normed queries and
keys, ReLU², capped logits, and its options: weights of the residual stream and of the embedding, value embeddings,
windows, smear, backout. All numbers stand in config.json.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast


class SkytrainConfig(PretrainedConfig):
    """The fields of config.json, as attributes."""

    model_type = "skytrain"
    keys_to_ignore_at_inference = ("past_key_values",)


def rms_norm(x: Tensor, config: SkytrainConfig) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=config.rms_norm_eps)


def waves(positions: Tensor, config: SkytrainConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions (B, T): (B, 1, T, head_dim / 2) in float32."""
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None, :, None] * config.rope_parameters["rope_theta"] ** (-pairs / config.head_dim)
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (B, H, T, D) whose pairs (i, i + D/2) turn by the angles, in nanochat's sense."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).type_as(x)


def mask_of(attention_mask: Tensor | None, past: int, tokens: Tensor, window: int | None) -> Tensor | None:
    """What each token sees in a window of this many tokens (None: all), the last of which is itself: (B or 1, 1, T,
    past + T); None for plain causal attention."""
    length = past + tokens.size(1)
    window = window or length
    if attention_mask is None and window >= length and (not past or tokens.size(1) == 1):
        return None
    order = torch.arange(length, device=tokens.device)
    behind = order[past:, None] - order
    seen = ((behind >= 0) & (behind < window))[None, None]
    if attention_mask is None:
        return seen
    return seen & attention_mask.bool()[:, None, None] | (behind == 0)  # padding sees itself: no softmax is empty


class SkytrainAttention(nn.Module):
    """Attention over (B, T, C), with embedded values if the layer has them."""

    def __init__(self, config: SkytrainConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)
        if layer in config.value_layers:
            self.ve_gate = nn.Linear(config.gate_width, config.num_key_value_heads, bias=False)

    def forward(
        self,
        x: Tensor,
        waves: tuple[Tensor, Tensor],
        embedded: Tensor | None,
        mask: Tensor | None,
        cache: DynamicCache | None,
    ) -> Tensor:
        config, (B, T, _) = self.config, x.shape
        made = (linear(x).view(B, T, -1, config.head_dim) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in made)
        q, k = (rms_norm(turned(heads, *waves), config) * config.qk_scale for heads in (q, k))
        if embedded is not None:
            gate = config.gate_scale * torch.sigmoid(self.ve_gate(x[..., : config.gate_width]))
            v = v + (gate[..., None] * embedded.view(B, T, -1, config.head_dim)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (heads.repeat_interleave(groups, 1) for heads in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and T > 1)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class SkytrainMLP(nn.Module):
    def __init__(self, config: SkytrainConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)).square())


class SkytrainLayer(nn.Module):
    def __init__(self, config: SkytrainConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.self_attn = SkytrainAttention(config, layer)
        self.mlp = SkytrainMLP(config)

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        x = x + self.self_attn(rms_norm(x, self.config), *inputs)
        return x + self.mlp(rms_norm(x, self.config))


class SkytrainPreTrainedModel(PreTrainedModel):
    config_class = SkytrainConfig
    base_model_prefix = "model"
    _no_split_modules = ["SkytrainLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True


class SkytrainModel(SkytrainPreTrainedModel):
    """Token ids (B, T) in, the input of the head (B, T, C) out."""

    def __init__(self, config: SkytrainConfig) -> None:
        super().__init__(config)
        c, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, c)
        self.layers = nn.ModuleList(SkytrainLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.ve = nn.ModuleDict({str(layer): nn.Embedding(config.vocab_size, kv) for layer in config.value_layers})
        if config.residual_lambdas:
            self.resid_lambdas = nn.Parameter(torch.ones(config.num_hidden_layers))
            self.x0_lambdas = nn.Parameter(torch.zeros(config.num_hidden_layers))
        if config.smear:
            self.smear_gate = nn.Parameter(torch.zeros(config.smear_width))
            self.smear_lambda = nn.Parameter(torch.zeros(1))
        if config.backout:
            self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
    ) -> Tensor:
        past, (_, T) = past_key_values.get_seq_length() if past_key_values is not None else 0, input_ids.shape
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -T:]
        elif position_ids is None:
            position_ids = torch.arange(past, past + T, device=input_ids.device)[None]
        cos_sin = waves(position_ids, self.config)
        windows = self.config.layer_windows
        masks = {window: mask_of(attention_mask, past, input_ids, window) for window in {*windows}}
        x = rms_norm(self.embed_tokens(input_ids), self.config)
        if self.config.smear:
            x = self.smeared(x, attention_mask, past_key_values)
        first = middle = x
        for n, layer in enumerate(self.layers):
            if self.config.residual_lambdas:
                x = self.resid_lambdas[n] * x + self.x0_lambdas[n] * first
            embedded = self.ve[str(n)](input_ids) if str(n) in self.ve else None
            x = layer(x, cos_sin, embedded, masks[windows[n]], past_key_values)
            middle = x if n == self.config.backout_layer else middle
        if self.config.backout:
            x = x - self.backout_lambda * middle
        return rms_norm(x, self.config)

    def smeared(self, x: Tensor, attention_mask: Tensor | None, cache: DynamicCache | None) -> Tensor:
        """Embeddings (B, T, C) with a gated part of the one before each; none for a first token. The cache holds them
        as the keys of a layer behind the last one, so beam search reorders them with the others."""
        (_, T, _), embeddings = x.shape, x
        if cache is not None:
            if len(cache.layers) == self.config.num_hidden_layers or not cache.layers:
                cache.layers += [DynamicLayer() for _ in range(self.config.num_hidden_layers + 1 - len(cache.layers))]
            embeddings = cache.update(x[:, None], x[:, None, :, :1], self.config.num_hidden_layers)[0][:, 0]
        before = F.pad(embeddings[:, -T - 1 :], (0, 0, 1, 0))[:, -T - 1 : -1]
        if attention_mask is not None:  # padding is before no token
            before = before * F.pad(attention_mask, (1, 0))[:, -T - 1 : -1, None]
        gate = torch.sigmoid((x[..., : self.config.smear_width] * self.smear_gate).sum(-1, keepdim=True))
        return x + self.smear_lambda * gate * before


class SkytrainForCausalLM(SkytrainPreTrainedModel, GenerationMixin):
    """The language model. Rows may be padded on the left, or on the right without a cache."""

    def __init__(self, config: SkytrainConfig) -> None:
        super().__init__(config)
        self.model = SkytrainModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, vocab_size) in float32, those of the last `logits_to_keep` tokens only (0: all), and with
        `labels` the mean loss."""
        if past_key_values is None and (not self.training if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        x = self.model(input_ids, attention_mask, position_ids, past_key_values)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        cap = self.config.final_logit_softcapping
        logits = cap * torch.tanh(self.lm_head(x[:, kept]).float() / cap)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
