"""Drafters in GGUF files in the layout of llama.cpp's `conversion/llama.py` and `conversion/qwen.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.drafters.eagle import Eagle
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.llm import load
from paceline.models.heads import BlockConfig, EagleConfig, HeadFile
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, run, tiny_target
from paceline.types import DraftBudget
from tests.support.gguf_writing import write_file
from tests.support.random_heads import BLOCK, DSPARK, EAGLE3, MUTUAL, REDUCED, WINDOWED, head_of
from tests.support.tiny_heads import eagle_config, eagle_tensors
from tests.support.toy_cli import run as run_command

EAGLE = replace(EAGLE3, fc_norm=False, norm_output=False)  # 3.1 has no GGUF
EAGLES = {
    "eagle-3": EAGLE,
    "normed, all tokens": replace(EAGLE, norm_before_fc=True, norm_before_residual=True, draft_vocab=64),
}
BLOCKS = {"block": BLOCK, "windows": WINDOWED, "windows, not causal": MUTUAL, "fewer tokens": REDUCED, "dspark": DSPARK}
CONFIGS: dict[str, EagleConfig | BlockConfig] = {**EAGLES, **BLOCKS}
NAMES = {"fc": "fc", "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
NAMES |= {f"markov_head.markov_w{i}": f"markov_w{i}" for i in (1, 2)} | {"confidence_head.proj": "conf_proj"}
NAMES |= {"selector": "selector_hidden", "lm_head": "output", "embed_tokens": "token_embd"}
NAMES |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
NAMES |= {"self_attn.o_proj": "attn_output"} | {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def laid_out(config: EagleConfig | BlockConfig, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    c = config.layer
    for name, x in tensors.items():
        if name == "d2t":
            yield name, x + torch.arange(len(x))
        elif name != "t2d":
            part, _, kind = name.rpartition(".")
            block, layer, rest = "", "", part
            if part.startswith("layers."):
                _, layer, rest = part.split(".", 2)
                block = f"blk.{layer}."
            if isinstance(config, EagleConfig) and rest[10:] in ("q_proj", "k_proj"):
                heads = c.heads if "q_proj" in rest else c.kv_heads
                x = x.view(heads, 2, c.head_dim // 2, -1).transpose(1, 2).reshape(x.shape)
            theirs = "attn_norm_2" if block and rest == "hidden_norm" else NAMES[rest]
            yield f"{block}{theirs}.{kind}", x.float()


def write(path: Path, head: HeadFile, **fields: Any) -> Path:
    config: Any = head.config
    arch, c = "eagle3" if isinstance(config, EagleConfig) else "dflash", config.layer
    own: dict[str, Any] = {
        **{"block_count": c.layers, "context_length": c.context_length, "embedding_length": c.hidden},
        **{"feed_forward_length": c.ffn, "attention.head_count": c.heads, "attention.head_count_kv": c.kv_heads},
        **{"attention.key_length": c.head_dim, "attention.value_length": c.head_dim},
        **{"attention.layer_norm_rms_epsilon": c.norms.eps, "rope.freq_base": c.rope.theta},
        **{"tokenizer.ggml.tokens": [f"t{i}" for i in range(c.vocab_size)], "target_layers": list(config.taps)},
    }
    if isinstance(config, EagleConfig):
        own["target_hidden_size"] = config.target_hidden
        own |= {name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc")}
    else:
        own |= {"block_size": config.size, "sample_from_anchor": config.from_anchor}
        own["tokenizer.ggml.mask_token_id"] = config.mask_token
        if windows := [layer.window for layer in c.plan if layer.window]:
            own["attention.sliding_window"] = windows[0]
            own["attention.sliding_window_pattern"] = [bool(x.window) for x in c.plan]
            own |= {} if config.causal else {"attention.causal": False}
    write_file(path, arch, own | fields, laid_out(config, dict(head.tensors)))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_drafter_in_the_folder_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    made = head_of(CONFIGS[name])
    folder, file = open_head(write_head(tmp_path / "a", made)), open_head(write(tmp_path / "a.gguf", made))
    assert file.config == folder.config
    assert {*file.tensors} == {*folder.tensors} - {"t2d"}
    for key in file.tensors:
        assert torch.equal(file.tensors[key].to(folder.tensors[key].dtype), folder.tensors[key]), key


def test_info_describes_a_head_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", head_of(EAGLE))
    facts = json.loads(run_command("info", str(path), "--json").stdout)
    assert (facts["head"], facts["layout"], facts["taps"], facts["bytes"]) == (
        *("eagle3", "llama.cpp", [2, 4, 5]),
        path.stat().st_size,
    )
    with pytest.raises(UnsupportedModel, match=r"is a drafter, not a model\. Name it as the drafter"):
        load(path)


def test_files_that_are_not_run(tmp_path: Path) -> None:
    made = head_of(BLOCK)
    with pytest.raises(UnsupportedModel, match="a drafter with logit_scale"):
        open_head(write(tmp_path / "a.gguf", made, logit_scale=0.5))
    strange = write(tmp_path / "b.gguf", replace(made, tensors={**made.tensors, "selector.weight": torch.ones(2, 2)}))
    with pytest.raises(UnsupportedModel, match="selector"):
        open_head(strange)
    with pytest.raises(CorruptModel, match=r"lacks 'dflash\.block_size"):
        open_head(write(tmp_path / "c.gguf", made, block_size=None))


def test_the_text_stays_the_same_whatever_a_file_holds(tmp_path: Path) -> None:
    config = eagle_config(taps=(0, 1))
    tensors = eagle_tensors(config)
    sampling, target = Sampling(max_new_tokens=12, temperature=0.8, seed=3), tiny_target()
    plain = run(target, [1, 2, 3, 4], sampling)[0]
    for change in ({}, {"norm.weight": torch.full((TINY.hidden,), torch.nan)}):
        head = open_head(write(tmp_path / "a.gguf", HeadFile(Path(), "", config, tensors | change)))
        drafter = Eagle(head.config, head.tensors, target)  # type: ignore[arg-type]
        assert run(target, [1, 2, 3, 4], sampling, drafter, DraftBudget(6, 3, 2))[0] == plain
    beyond = tensors | {"d2t": torch.full((23,), 30)}
    head = open_head(write(tmp_path / "b.gguf", HeadFile(Path(), "", config, beyond)))
    with pytest.raises(CorruptModel, match="beyond the 37"):
        Eagle(head.config, head.tensors, target)  # type: ignore[arg-type]
