"""gpt-oss's own layouts: stacked experts, in floats and MXFP4, as folders and as llama.cpp lays out a GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models
from torch import Tensor
from typer.testing import CliRunner

from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.expert_tensors import ExpertTensors
from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.loader import Loaded, load_model
from paceline.cli import app
from paceline.engine.self_check import guarantee
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import read_rows
from paceline.models.decoder import Decoder
from paceline.models.layers import Mixture
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run
from paceline.types import DraftBudget
from tests.support.gguf_writing import config_fields, rope_scaling_fields, stored_name, write_file
from tests.support.lazy import transformers
from tests.support.logits import expected, feed, text

native = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")

EXPERTS, HIDDEN, FFN, LAYERS = 4, 64, 96, 2
STACKS = {"gate_up_proj": (2 * FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
HARMONY = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
Files = tuple[Path, Path, Path, Any]
"""A folder in OpenAI's layout, one with the same values in floats, a GGUF, and transformers' model."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{"vocab_size": 101, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": FFN, "num_local_experts": EXPERTS},
        **{"num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": 512, "initializer_range": 0.2},
        **{"eos_token_id": 97, "pad_token_id": None},
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(1)
    packed = {}
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(STACKS)):
            out, width = STACKS[name.rpartition(".")[2]]
            blocks = torch.randint(0, 256, (EXPERTS, out, width // 32, 16), dtype=torch.uint8, generator=draw)
            scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8, generator=draw)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            unpacked = transformers.integrations.mxfp4.convert_moe_packed_tensors
            parameter.data = unpacked(blocks, scales, dtype=torch.float32)
        elif parameter.dim() == 1 or name.endswith("_bias"):
            torch.nn.init.normal_(parameter, float("norm" in name or "sinks" in name), 0.5)
    model.save_pretrained(root / "floats")
    names = load_file(root / "floats" / "model.safetensors")
    others = {name: tensor for name, tensor in names.items() if not name.endswith(tuple(STACKS))}
    (root / "mxfp4").mkdir()
    save_file(others | packed, root / "mxfp4" / "model.safetensors", {"format": "pt"})
    raw = json.loads((root / "floats" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (root / "mxfp4" / "config.json").write_text(json.dumps(raw))
    for folder in ("floats", "mxfp4"):
        backend = Backend(models.BPE(vocab={f"t{i}": i for i in range(97)}, merges=[]))
        backend.add_special_tokens(HARMONY)
        backend.save(str(root / folder / "tokenizer.json"))
    write_gguf(root / "model.gguf", config, others, packed)
    return root / "mxfp4", root / "floats", root / "model.gguf", model


def write_gguf(path: Path, c: Any, tensors: dict[str, Tensor], packed: dict[str, Tensor]) -> None:
    """Write a model in the layout of convert_hf_to_gguf.py."""
    words = {"model": "gpt2", "pre": "gpt-4o", "tokens": [*(f"t{i}" for i in range(96)), "t0t1", *HARMONY]}
    words |= {"merges": ["t0 t1"], "eos_token_id": 97}
    fields = (
        config_fields(c)
        | rope_scaling_fields(c.rope_parameters)
        | {
            **{"expert_count": EXPERTS, "expert_used_count": c.num_experts_per_tok, "expert_feed_forward_length": FFN},
            "attention.sliding_window": c.sliding_window,
            **{f"tokenizer.ggml.{key}": value for key, value in words.items()},
        }
    )
    write_file(path, "gpt-oss", fields, [*_floats(tensors), *_codes(packed)])


def _floats(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, x in tensors.items():
        if name.endswith("gate_up_proj_bias"):
            for index, part in enumerate(("gate_proj", "up_proj")):
                yield stored_name("gpt-oss", name.replace("gate_up_proj_bias", f"{part}.bias")), x[:, index::2]
        else:
            own = name.replace("_bias", ".bias") + ".weight" * name.endswith("sinks")
            yield stored_name("gpt-oss", own), x


def _codes(packed: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    for name in packed:
        if name.endswith("_blocks"):
            stack, blocks, scales = name.removesuffix("_blocks"), packed[name], packed[name.replace("blocks", "scales")]
            for part in ("gate", "up") if "gate_up" in stack else ("down",):
                rows = slice("gate_up" in stack and part == "up", None, 2) if "gate_up" in stack else slice(None)
                own = stored_name("gpt-oss", stack.replace("gate_up_proj", f"{part}_proj") + ".weight")
                yield own, repacked(blocks[:, rows].numpy(), scales[:, rows].numpy())


def repacked(blocks: Any, scales: Any) -> Any:
    """Build ggml's blocks value by value: an exponent, then 16 bytes, with all low halves before all high halves."""
    codes = np.zeros((*blocks.shape[:3], 32), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = blocks % 16, blocks // 16
    data = np.concatenate([scales[..., None], codes[..., :16] + 16 * codes[..., 16:]], -1)
    return data.reshape(*data.shape[:2], -1)


def logits_of(loaded: Loaded, tokens: list[int]) -> Tensor:
    assert isinstance(loaded.target, Decoder)
    cache = loaded.target.new_cache()
    slot = cache.acquire()
    parts = [feed(loaded.target, cache, slot, tokens[a:b]) for a, b in ((0, 20), (20, 21), (21, len(tokens)))]
    return torch.cat(parts)


def errors_of(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the relative error of each row."""
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["mxfp4", "floats", "gguf"])
def test_every_layout_equals_transformers_model(files: Files, which: int) -> None:
    loaded = load_model(files[which], dtype="float32", device="cpu")
    right = expected(files[3], text(60))
    assert errors_of(logits_of(loaded, text(60)), right).max() < 1e-4


def test_the_layouts_have_the_same_tensors(files: Files) -> None:
    packed, floats, file = (open_checkpoint(path).tensors for path in files[:3])
    assert set(packed) == set(floats) == set(file)
    for name, tensor in floats.items():
        assert torch.equal(packed[name], tensor), name
        assert torch.equal(file[name], tensor), name
        assert packed.shape(name) == tuple(tensor.shape)  # type: ignore[attr-defined]


@native
def test_stored_codes_are_the_files_own(files: Files) -> None:
    packed, file = (open_checkpoint(path).tensors for path in (files[0], files[2]))
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.3.{part}.weight"
        for tensors in (packed, file):
            stored = tensors.stored(name)  # type: ignore[attr-defined]
            assert stored.kinds == (39,)
            assert torch.equal(read_rows(stored), packed[name])


@native
@pytest.mark.parametrize("which", [0, 2], ids=["folder", "gguf"])
def test_experts_run_on_the_codes_that_they_are_stored_in(files: Files, which: int) -> None:
    loaded = load_model(files[which], device="cpu", quantize="auto")
    target = loaded.target
    assert isinstance(target, Decoder)
    assert loaded.quantize == "int8"
    assert guarantee(target) == "bits"
    mixture = target._stack._parts[0].layers[0].mlp
    assert isinstance(mixture, Mixture)
    dense: Any = mixture.experts[0]
    assert dense.gate_up.linear.matrix.kinds == dense.down.matrix.kinds == (64 + 39,)
    # Exclude rows for which rounding changes the experts.
    assert errors_of(logits_of(loaded, text(60)), expected(files[3], text(60))).median() < 0.1


@pytest.mark.parametrize("shape", [DraftBudget.chain(4), DraftBudget(9, 4, 3)], ids=["chain", "tree"])
def test_drafts_change_no_text(files: Files, shape: DraftBudget) -> None:
    target = load_model(files[0], device="cpu", quantize="auto").target
    for how in (Sampling(max_new_tokens=40), Sampling(max_new_tokens=40, temperature=0.8, seed=5)):
        plain = run(target, text(30), how)[0]
        drafted, _, stats = run(target, text(30), how, Oracle([*text(30), *plain], 0.7, 101), shape)
        assert drafted == plain
        assert stats.accepted > 10


def test_a_message_ends_no_reply(files: Files) -> None:
    """`<|end|>` ends a reply in other models, but here the next message follows."""
    assert open_gguf(files[2])[0]["eos_token_id"] == [97, 98]


def test_info_names_it(files: Files) -> None:
    size = sum(parameter.numel() for parameter in files[3].parameters())
    for path in files[:3]:
        result = CliRunner().invoke(app, ["info", str(path), "--json"])
        facts = json.loads(result.stdout)
        assert (facts["family"], facts["runs"], facts["parameters"]) == ("gpt_oss", "natively", size)
        assert (facts["own_codes"].get("4", 0.0) > 0.75) == (path != files[1] and library() is not None)


BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(BLOCKS), "down_proj_scales has shape .* no stack of experts"),
        (lambda x: x.pop(BLOCKS.replace("blocks", "scales")), "down_proj_blocks has shape"),
        (lambda x: x.update({BLOCKS: x[BLOCKS][..., :8]}), "down_proj_scales has shape"),
        (lambda x: x.update({BLOCKS: x[BLOCKS][0]}), "has shape .* no stack"),
        (lambda x: x.update({BLOCKS: x[BLOCKS][:0]}), "has shape .* no stack"),
        (lambda x: x.update({name: x[name][:2] for name in x if ".0.mlp.experts" in name}), "lacks .*experts.2"),
        (lambda x: x.update({BLOCKS: x[BLOCKS].float()}), "must be bytes, got torch.float32"),
    ],
)
def test_stacks_that_are_none_are_refused(
    files: Files, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    tensors = load_file(files[0] / "model.safetensors")
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((files[0] / name).read_bytes())
    with pytest.raises(CorruptModel, match=message):
        load_model(tmp_path, device="cpu", dtype="float32")


def test_a_stack_of_endless_experts_is_not_counted_out() -> None:
    endless = torch.empty(1, 1, 1).expand(2**40, 1, 1)
    with pytest.raises(CorruptModel, match="no stack of experts"):
        ExpertTensors({"model.layers.0.mlp.experts.down_proj": endless})


def test_an_unknown_swiglu_variant_is_refused(files: Files) -> None:
    from paceline.checkpoints.model_config import read_config

    raw = open_checkpoint(files[1]).config
    assert read_config(raw).attention.sinks
    with pytest.raises(UnsupportedModel, match="swiglu_limit"):
        read_config({**raw, "swiglu_limit": 5.0})
    with pytest.raises(UnsupportedModel, match="quantised with awq"):
        folder_of_method(files[0], "awq")


def folder_of_method(folder: Path, method: str) -> None:
    config = folder / "config.json"
    before = config.read_text()
    config.write_text(before.replace("mxfp4", method))
    try:
        open_checkpoint(folder)
    finally:
        config.write_text(before)
