"""What Paceline writes is what the public `speculators` library loads, and what that saves Paceline reads.

Runs where `speculators` can be imported; its own requirements are heavy, so it is no dependency of the tests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.models.config import NormConfig
from paceline.models.heads import EagleConfig, HeadFile
from paceline.models.norms import RMSNorm
from paceline.models.rope import Rotary, rotate
from tests.support.random_heads import EAGLE3, LAYER, folder_of, head_of

pytest.importorskip("speculators", reason="the speculators library is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

VARIANTS = [
    EAGLE3,
    replace(EAGLE3, fc_norm=False, norm_output=False, norm_before_residual=True, norm_before_fc=True),
    replace(EAGLE3, layer=replace(LAYER, family="qwen3", norms=NormConfig(1e-5, heads="shared")), draft_vocab=64),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent the library from contacting the hub. The environment variable would affect the whole process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
    config |= {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: torch.randn(64, 32, generator=torch.Generator().manual_seed(5)) for name in names}
    return folder_of(tmp_path / "verifier", config, tensors | {"model.norm.weight": torch.ones(32)})


def read_embedding(verifier: Path) -> Tensor:
    return load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the library's model, and its report about the tensors."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import PreTrainedModel

    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    # The library's from_pretrained cannot return the report.
    _, report = PreTrainedModel.from_pretrained.__func__(
        Eagle3DraftModel, str(folder), config=config, output_loading_info=True
    )
    model = Eagle3DraftModel.from_pretrained(str(folder), config=config).eval()
    if "embed_tokens.weight" not in open_head(folder).tensors:
        # In transformers 5, a missing tensor has arbitrary contents, but the library replaces only NaN.
        torch.nn.init.constant_(model.embed_tokens.weight, torch.nan)
        model.load_verifier_weights()
    return model, report


@pytest.mark.parametrize("embedded", [True, False], ids=["embedding stored", "embedding of the verifier"])
@pytest.mark.parametrize("config", VARIANTS)
def test_they_find_every_tensor_and_compute_the_same(
    config: EagleConfig, embedded: bool, verifier: Path, tmp_path: Path
) -> None:
    head, embedding = head_of(config, target=str(verifier)), read_embedding(verifier)
    if embedded:
        head = replace(head, tensors={**head.tensors, "embed_tokens.weight": embedding})
    model, report = load(write_head(tmp_path / "head", head))
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in head.tensors.items())
    generator = torch.Generator().manual_seed(1)
    taps, tokens = torch.randn(1, 10, 96, generator=generator), torch.randint(64, (1, 10), generator=generator)
    said: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: said.append(out))
    with torch.no_grad():
        model(taps, tokens, torch.zeros(1, 10, dtype=torch.long), ttt_steps=1)
    torch.testing.assert_close(said[0], plain(head, config, taps, embedding[tokens]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", VARIANTS)
def test_heads_that_speculators_saves_read_the_same(config: EagleConfig, verifier: Path, tmp_path: Path) -> None:
    head = head_of(config, target=str(verifier))
    model, _ = load(write_head(tmp_path / "head", head))
    model.save_pretrained(tmp_path / "theirs")
    read = open_head(tmp_path / "theirs")
    assert (read.layout, read.config, read.target) == ("speculators", config, str(verifier))
    assert read.extra == head.extra
    assert set(read.tensors) - set(head.tensors) == {"embed_tokens.weight"}
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in head.tensors.items())


def plain(head: HeadFile, c: EagleConfig, taps: Tensor, embedded: Tensor) -> Tensor:
    """Compute the first step of EAGLE-3 over a whole text, as in the paper: logits [B, T, draft_vocab]."""
    weight = {name.removesuffix(".weight"): tensor for name, tensor in head.tensors.items()}
    at = "layers.0."

    def norm(name: str, x: Tensor) -> Tensor:
        return RMSNorm(weight[name], c.layer.norms.eps)(x)

    if c.norm_before_fc:
        taps = norm("input_norm", taps)
    if c.fc_norm:
        taps = torch.cat([norm(f"fc_norm.{i}", x) for i, x in enumerate(taps.chunk(3, -1))], -1)
    raw = taps @ weight["fc"].T
    hidden = norm(at + "hidden_norm", raw)
    both = torch.cat([norm(at + "input_layernorm", embedded), hidden], -1)
    b, t, _ = both.shape
    q, k, v = ((both @ weight[f"{at}self_attn.{x}_proj"].T).view(b, t, -1, c.layer.head_dim) for x in "qkv")
    if c.layer.norms.heads:
        q, k = norm(at + "self_attn.q_norm", q), norm(at + "self_attn.k_norm", k)
    rope = Rotary(c.layer.rope, c.layer.head_dim, torch.float32, torch.device("cpu"))
    cos, sin = rope(torch.arange(t)[None], t, [t])
    q, k, v = (x.transpose(1, 2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(b, t, -1)
    x = (hidden if c.norm_before_residual else raw) + mixed @ weight[at + "self_attn.o_proj"].T
    inner = norm(at + "post_attention_layernorm", x)
    gate, up = (inner @ weight[f"{at}mlp.{name}_proj"].T for name in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ weight[at + "mlp.down_proj"].T
    return norm("norm", x) @ weight["lm_head"].T
