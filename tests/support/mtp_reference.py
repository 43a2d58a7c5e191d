"""A second multi-token-prediction layer, around transformers' own decoder layer: whole texts, no cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.types import Tap, Want
from paceline.verify.tree import pack_prefix
from tests.support.golden import models

_QWEN = ("mtp.layers.0.", *(f"mtp.{x}.weight" for x in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")))
_DEEPSEEK = (
    "model.layers.4.",
    *(f"model.layers.4.{x}.weight" for x in ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
)
_MIMO = (
    "model.mtp_layers.0.",
    *(
        f"model.mtp_layers.0.{x}.weight"
        for x in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    ),
)
"""Tensor names of the layer, the projection, the norms before the projection, and the norm after the layer."""
_NAMES = {"deepseek_v3": _DEEPSEEK, "glm4_moe": _DEEPSEEK, "mimo": _MIMO}


class Reference:
    """A random model in float64, and a random layer of the same kind as its last attention layer."""

    def __init__(self, case: str) -> None:
        self.model, self.target = models("qwen2" if case == "mimo" else case)
        config = self.model.config
        self.kind = "mimo" if case == "mimo" else config.model_type
        norm = partial(type(self.model.model.norm), eps=config.rms_norm_eps)
        width = config.hidden_size
        self.own = _NAMES.get(self.kind, _QWEN)
        at = config.layer_types.index("full_attention") if self.own is _QWEN else config.num_hidden_layers - 1
        torch.manual_seed(1)
        self.layer = type(self.model.model.layers[at])(config, at)
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.before = torch.nn.ModuleList([norm(width), norm(width)])
        self.after = norm(width)
        for part in (self.layer, self.fc, self.before, self.after):
            for parameter in part.parameters():
                torch.nn.init.normal_(parameter, 0.0, 0.2)
            part.double().eval()
        for buffer in self.layer.buffers():
            torch.nn.init.normal_(buffer, 0.0, 0.2)
        for module in self.layer.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = "eager"

    def tensors(self, stacked: bool = False) -> dict[str, Tensor]:
        """Return tensors by their names in the family's files. GLM-4.5's files repeat embedding and head.

        `stacked`: stack the experts, as transformers does.
        """
        layer, *names = self.own
        parts = (self.fc, *self.before, self.after)
        named = {name: part.weight for name, part in zip(names, parts, strict=True)}
        for name, x in self.layer.state_dict().items():
            block, _, part = name.rpartition("experts.")
            single = self.kind in ("qwen3_next", "deepseek_v3", "glm4_moe") and not stacked
            if part not in ("gate_up_proj", "down_proj") or not single:
                named[layer + name] = x
                continue
            for number, expert in enumerate(x):
                halves = expert.chunk(2) if part == "gate_up_proj" else [expert]
                for each, half in zip(("gate_proj", "up_proj") if len(halves) > 1 else (part,), halves, strict=True):
                    named[f"{layer}{block}experts.{number}.{each}.weight"] = half
        shared = {"embed_tokens": self.model.model.embed_tokens, "shared_head.head": self.model.lm_head}
        if self.kind == "glm4_moe":
            named |= {f"{layer}{name}.weight": part.weight for name, part in shared.items()}
        return named

    def save(self, folder: Path) -> Path:
        """Write model and layer as one checkpoint."""
        self.model.save_pretrained(folder)
        both = load_file(folder / "model.safetensors") | self.tensors()
        save_file({name: x.detach().clone() for name, x in both.items()}, folder / "model.safetensors")
        if self.kind == "mimo":  # transformers has no MiMo, but it is a Qwen2
            config = json.loads((folder / "config.json").read_text())
            named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
            (folder / "config.json").write_text(json.dumps(config | named))
        return folder

    @torch.no_grad()
    def after_path(self, text: Sequence[int], path: Sequence[int], head: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [V], and the states [H] behind them, after a text and the drafted tokens that follow it.

        `head` replaces the model's own head.
        """
        tap = self.target.layers if self.kind == "mimo" else "final"
        hidden = final_states(self.target, text[:-1], tap)
        tokens, out = list(text[1:]), self.step(text[1:], hidden)
        for token in path:
            tokens.append(token)
            hidden = torch.cat([hidden, out[-1:]])
            out = self.step(tokens, hidden)
        return (self.model.lm_head.weight if head is None else head) @ out[-1], out[-1]

    def step(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Return the layer's output for all rows of a text [n, H]."""
        n = len(tokens)
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = [self.before[0](embedded), self.before[1](hidden)]
        x = self.fc(torch.cat(both[::-1] if self.kind == "mimo" else both, -1))[None]
        positions = torch.arange(n)[None]
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        mask = torch.zeros(n, n, dtype=x.dtype).masked_fill(later, -torch.inf)[None, None]
        turned: Any = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, position_embeddings=turned, attention_mask=mask, position_ids=positions)
        normed: Tensor = self.after(out[0] if isinstance(out, tuple) else out)
        return normed[0]


def final_states(target: Decoder, text: Sequence[int], tap: Tap = "final") -> Tensor:
    """Return the input [n, H] of the target's head at every position of a text, or of its last norm, see `tap`."""
    cache = target.new_cache()
    rows = pack_prefix(text, cache.acquire(), 0, target.device)
    return target.forward(rows, cache, Want("none", (tap,))).taps[tap][0, : len(text)]
