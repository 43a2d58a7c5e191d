"""GGUF files: the container, dequantisation, and the conversion to Hugging Face's names."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.checkpoints import gguf_file
from paceline.checkpoints.checkpoint import EMBEDDING, eos_token_ids, open_checkpoint
from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.gguf_file import gguf_vocab_size, read_gguf
from paceline.checkpoints.gguf_tensors import unpair
from paceline.checkpoints.loader import HeadTokens, load_model
from paceline.errors import CorruptModel, ModelNotFound, PacelineError, UnsupportedModel
from paceline.files.locate import resolve
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import NativeLinear, read_rows
from paceline.kernels.linear import linear
from paceline.kernels.quantize import Codes, Mode, quantize
from paceline.kernels.stored import Stored
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.models.weights import Weights
from tests.support.gguf_writing import FFN, HEADS, HIDDEN, KV_HEADS, VOCAB, Q, finish, write_gguf


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0])
def test_values_equal_the_gguf_library(tmp_path: Path, kind: Q) -> None:
    expected = write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind)
    tensors = open_gguf(tmp_path / "m.gguf")[1]
    assert len(tensors) == len(expected)
    for hf, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }.items():
        assert np.array_equal(tensors[hf].float().numpy(), expected[theirs])


def test_the_vocabulary_size_is_read_without_the_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert gguf_vocab_size(tmp_path / "m.gguf") == VOCAB
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:200])
    with pytest.raises(CorruptModel, match="cut off"):
        gguf_vocab_size(tmp_path / "cut.gguf")


def test_types_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Q.Q8_0)
    data = (tmp_path / "m.gguf").read_bytes()
    entry = (
        b"token_embd.weight" + (2).to_bytes(4, "little") + HIDDEN.to_bytes(8, "little") + VOCAB.to_bytes(8, "little")
    )
    for kind, name in ((9, "Q8_1"), (77, "77")):
        damaged = data.replace(entry + bytes([8, 0, 0, 0]), entry + bytes([kind, 0, 0, 0]))
        assert damaged != data
        (tmp_path / "x.gguf").write_bytes(damaged)
        with pytest.raises(UnsupportedModel, match=name):
            open_gguf(tmp_path / "x.gguf")


def test_config_of_a_tied_llama(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", fields={"llama.rope.freq_base": 5e5, "tokenizer.ggml.eot_token_id": 2})
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert opened.config == {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "intermediate_size": FFN,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 5e5,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 3,
        "eos_token_id": [4, 2],
    }
    assert opened.generation == {}
    assert eos_token_ids(opened.config, opened.generation, opened.tokenizer) == (4, 2)
    assert opened.tokenizer.encode("abb") == [2, 1]


def test_tokens_spelled_as_an_end_end_a_reply(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokens=["a", "<end_of_turn>", "ab", "<|eot_id|>", "</s>"])
    assert open_gguf(tmp_path / "m.gguf")[0]["eos_token_id"] == [4, 1, 3]


def test_windows_tell_mistral_from_llama(tmp_path: Path) -> None:
    for window, expected in ((0, ("llama", None)), (8, ("mistral", 8))):
        write_gguf(tmp_path / "m.gguf", fields={"llama.attention.sliding_window": window})
        config = open_gguf(tmp_path / "m.gguf")[0]
        assert (config["model_type"], config.get("sliding_window")) == expected


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, "fff"),
        ({"gemma3.attention.sliding_window": 8}, "sss"),
        ({"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": 2}, "sfs"),
        (
            {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": [True, False, False]},
            "sff",
        ),
    ],
)
def test_gemma_layers_have_windows_by_their_pattern(tmp_path: Path, fields: dict[str, Any], windowed: str) -> None:
    write_gguf(tmp_path / "m.gguf", "gemma3", layers=3, fields=fields)
    assert "".join(kind[0] for kind in open_gguf(tmp_path / "m.gguf")[0]["layer_types"]) == windowed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": [True]},
            "names 1 of 3 layers",
        ),
        ({"gemma3.nextn_predict_layers": 3}, "no layers except MTP layers"),
    ],
)
def test_metadata_of_fewer_layers_than_there_are_is_damaged(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    write_gguf(tmp_path / "m.gguf", "gemma3", layers=3, fields=fields)
    with pytest.raises(CorruptModel, match=said):
        open_gguf(tmp_path / "m.gguf")


def test_untied_qwen2_with_biases(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", tied=False, tensors={"blk.0.attn_q.bias": (HIDDEN,)})
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    assert config["model_type"] == "qwen2"
    assert config["attention_bias"] is True
    assert config["tie_word_embeddings"] is False
    assert {"lm_head.weight", "model.layers.0.self_attn.q_proj.bias"} <= set(tensors)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, fields: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    write_gguf(tmp_path / "m.gguf", fields=fields)
    assert open_gguf(tmp_path / "m.gguf")[0].get("rope_scaling") == scaling


def test_llama3_factors(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": (8,)})
    config, tensors, _ = open_gguf(tmp_path / "m.gguf")
    assert config["rope_freqs"] == expected["rope_freqs.weight"].astype(float).tolist()
    assert not any("rope" in name for name in tensors)


def test_unpair_undoes_the_converters_order(tmp_path: Path) -> None:
    """llama.cpp stores rows 0, D/2, 1, D/2 + 1, ... of each head. The values are the original row indices."""
    rows = torch.arange(2 * 8)
    paired = torch.stack([rows.view(2, 2, 4)[:, 0], rows.view(2, 2, 4)[:, 1]], dim=-1).flatten()
    assert paired[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert unpair(paired, heads=2).tolist() == rows.tolist()
    expected = write_gguf(tmp_path / "m.gguf")
    tensors = open_gguf(tmp_path / "m.gguf")[1]
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        stored = torch.from_numpy(expected[f"blk.0.attn_{part}.weight"].copy())
        assert torch.equal(tensors[f"model.layers.0.self_attn.{part}_proj.weight"], unpair(stored, heads))


@pytest.mark.parametrize("kind", [Q.F32, Q.Q4_1, Q.Q8_0])
def test_codes_have_the_layout_of_their_tensors(tmp_path: Path, kind: Q) -> None:
    write_gguf(tmp_path / "m.gguf", kind=kind)
    tensors = open_gguf(tmp_path / "m.gguf")[1]
    for name in tensors:
        codes = tensors.codes(name)
        assert (codes is None) == (kind == Q.F32 or "norm" in name)
        if codes:
            assert torch.equal(codes.dequantised(), tensors[name])


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize(("kind", "bits"), [(Q.Q4_0, 4), (Q.Q4_1, 4), (Q.Q5_0, 8), (Q.Q8_0, 8), (Q.F16, None)])
def test_a_quantised_file_keeps_its_codes_of(tmp_path: Path, kind: Q, bits: int | None, mode: Mode) -> None:
    """In every mode, because quantising codes again would round twice."""
    write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind, tied=False)
    opened = open_checkpoint(tmp_path / "m.gguf")
    weights = Weights(Quantised(opened.tensors, mode), torch.float32, torch.device("cpu"))
    for name, tensor in opened.tensors.items():
        if "norm" in name or "embed" in name:
            continue
        head = name == "lm_head.weight"
        codes = weights.head(name, tensor.shape) if head else weights.matrix(name, tensor.shape)
        if isinstance(codes, Codes):
            assert codes.bits == (bits or (8 if mode == "int8" or head else 4))
        else:
            assert isinstance(codes, Stored)
            assert (codes.types == int(kind)).all()
            assert codes.is_float == (bits is None)
            assert codes.target == (8 if mode == "int8" or head else 4)
        assert torch.equal(linear(codes).weight(), tensor) == (bits is not None)


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0])
def test_an_embedding_that_is_no_head_stays_in_the_file(tmp_path: Path, kind: Q) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind, tied=False)
    model = load_model(tmp_path / "m.gguf", quantize="auto").target
    assert isinstance(model, Decoder)
    [table] = model.tables
    assert isinstance(table, Stored)
    assert table.mapped
    weights = Weights(Quantised(open_checkpoint(tmp_path / "m.gguf").tensors, "int8"), model.dtype, model.device)
    head = weights.embedding(EMBEDDING, table.shape, True)
    assert isinstance(head, NativeLinear)
    tokens = torch.tensor([[4, 0], [4, 2]])
    assert torch.equal(read_rows(table[tokens.flatten()]).view(2, 2, -1), head.matrix.rows(tokens))


def test_a_type_without_kernels_is_quantised_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "packs", lambda number: False)
    write_gguf(tmp_path / "m.gguf", "qwen2", kind=Q.Q4_1)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    name = "model.layers.0.mlp.up_proj"
    weight = tensors[name + ".weight"]
    floats = Weights(tensors, torch.bfloat16, torch.device("cpu")).linear({name: FFN}, HIDDEN)
    assert torch.equal(floats.weight(), weight.bfloat16())
    codes = Weights(Quantised(tensors, "int4"), torch.bfloat16, torch.device("cpu")).linear({name: FFN}, HIDDEN)
    assert torch.equal(codes.weight(), quantize(weight, 8).dequantised())


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0, Q.F16])
def test_requantised_matrices_have_the_bits_asked_for(tmp_path: Path, kind: Q) -> None:
    """This applies to draft models, to any type in the file, and to the output head."""
    write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind, tied=False)
    opened = open_checkpoint(tmp_path / "m.gguf")
    weights = Weights(Quantised(opened.tensors, "int4", requantise=True), torch.float32, torch.device("cpu"))
    for name, tensor in opened.tensors.items():
        if tensor.ndim < 2 or "embed" in name:
            continue
        matrix = weights.head(name, tensor.shape) if name == "lm_head.weight" else weights.matrix(name, tensor.shape)
        if isinstance(matrix, Codes):
            assert matrix.bits == 4
        product = linear(matrix)
        if isinstance(product, NativeLinear):
            assert product.matrix.nbytes <= -(-tensor.shape[0] // 16) * 16 * tensor.shape[1] * 5 / 8
        assert torch.equal(product.weight(), tensor) == (kind in (Q.Q4_0, Q.Q4_1))
        assert (product.weight() - tensor).square().mean() < 0.01 * tensor.square().mean()


def test_draft_models_are_requantised_unless_told_otherwise(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", kind=Q.Q8_0)
    load = partial(load_model, tmp_path / "m.gguf", quantize="auto")
    keep_all: HeadTokens = lambda tokenizer, size: None  # noqa: E731
    assert load().quantize == ("int8" if library() else None)
    assert load(head_tokens=keep_all).quantize == ("int4" if library() else None)
    assert load(head_tokens=keep_all, quantize="none").quantize is None
    assert load(head_tokens=keep_all, dtype="float32").quantize is None


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("grok", {}, "'grok'.*gemma2, gemma3, gemma4, glm4, glm4moe, gpt-oss"),
        ("mamba", {}, "recurrent"),
        ("rwkv6", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("gemma3n", {}, "multimodal"),
        ("clip", {}, "multimodal"),
        ("nomic-bert", {}, "encoder"),
        ("llama", {"fields": {"general.type": "adapter"}}, "'adapter'"),
        ("clip", {"fields": {"general.type": "mmproj"}}, "'mmproj'"),
        ("llama", {"fields": {"split.count": 3}}, "merge"),
        ("llama", {"fields": {"llama.feed_forward_length": [96]}}, "different widths"),
        ("llama", {"fields": {"llama.attention.value_length": 8}}, "different sizes"),
        ("llama", {"fields": {"llama.pooling_type": 3}}, "embeds or ranks"),
        ("llama", {"fields": {"llama.rope.dimension_count": 8}}, "part of each head"),
        ("qwen2", {"tensors": {"blk.0.attn_q_norm.weight": (16,)}}, "attn_q_norm"),
    ],
)
def test_unsupported_files_are_refused(tmp_path: Path, arch: str, options: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "m.gguf", arch, **options)
    with pytest.raises(UnsupportedModel, match=message):
        open_gguf(tmp_path / "m.gguf")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 1200, 7), len(data) // 2, len(data) - 32]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(CorruptModel, match=r"cut\.gguf"):
            open_checkpoint(tmp_path / "cut.gguf")


def test_damaged_headers_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(data)
        damaged[int(random.integers(4, 1200))] = int(random.integers(0, 256))
        (tmp_path / "x.gguf").write_bytes(damaged)
        with contextlib.suppress(PacelineError):
            dict(open_checkpoint(tmp_path / "x.gguf").tensors)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"PK\3\4" + bytes(40), CorruptModel),
        (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(40), UnsupportedModel),
        (b"GGUF" + bytes([9, 0, 0, 0]) + bytes(40), UnsupportedModel),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, error: type[Exception]) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(error, match=r"x\.gguf"):
        read_gguf(tmp_path / "x.gguf")
    with pytest.raises(ModelNotFound):
        read_gguf(tmp_path / "none.gguf")


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_equals_the_gguf_library() -> None:
    """Compare only the tensors with the library's reader, bit for bit, because it reads vocabularies slowly."""
    try:
        path = resolve("demo", quiet=True)
    except PacelineError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
    config, tensors, fields = open_gguf(path)
    assert (config["num_hidden_layers"], config["vocab_size"], config["head_dim"]) == (30, 49152, 64)
    assert len(tensors) == 272
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for mine, name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.29.mlp.up_proj.weight": "blk.29.ffn_up.weight",
        "model.layers.7.input_layernorm.weight": "blk.7.attn_norm.weight",
    }.items():
        values = gguf.dequantize(theirs[name].data, theirs[name].tensor_type)
        assert np.array_equal(tensors[mine].numpy(), values)
    assert fields["tokenizer.ggml.pre"] == "smollm"


def split(path: Path, folder: Path, count: int) -> list[Path]:
    """Split the file as llama.cpp's gguf-split does, with all metadata in the first part."""
    reader = gguf.GGUFReader(path)
    parts = []
    for number in range(count):
        part = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    kind, inner = field.types[0], field.types[-1]
                    inner = inner if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), kind, inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
        parts.append(part)
    return parts


def test_a_split_file_is_read_as_one(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "whole.gguf", kind=Q.Q8_0)
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = split(tmp_path / "whole.gguf", folder, 3)
    assert resolve(folder) == parts[0]
    config, tensors, _ = open_gguf(parts[0])
    whole = open_gguf(tmp_path / "whole.gguf")
    assert config == whole[0]
    assert set(tensors) == set(whole[1])
    assert len(tensors) == len(expected)
    assert all(torch.equal(tensors[name], whole[1][name]) for name in tensors)
    assert load_model(parts[0]).target.vocab_size == VOCAB


def test_a_split_file_that_is_incomplete(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    parts = split(tmp_path / "whole.gguf", tmp_path, 3)
    with pytest.raises(UnsupportedModel, match=r"later part of a split GGUF. Name the first, m-00001-of-00003.gguf"):
        read_gguf(parts[1])
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CorruptModel, match="is not part 3 of"):
        read_gguf(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelNotFound, match=r"m-00003-of-00003.gguf is missing"):
        read_gguf(parts[0])
    parts[2].write_bytes(third)
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedModel, match="its name does not say which"):
        read_gguf(tmp_path / "other.gguf")
