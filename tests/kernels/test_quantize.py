"""Weights as integers: their values, the choice of weights, and rows that do not affect other rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paceline
from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.eagle import Eagle
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.suffix import Suffix
from paceline.errors import CorruptModel, InvalidOption
from paceline.kernels.linear import linear
from paceline.kernels.quantize import GROUP, Codes, Mode, quantize, round_activations, stack
from paceline.models.config import MixtureConfig, ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.models.weights import Weights
from paceline.protocols import TargetWithHead
from paceline.sampling.parameters import Sampling
from paceline.testing import TINY, random_tensors, run
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import pack, pack_prefix
from tests.support.cover import cover
from tests.support.tiny_heads import TINY_BLOCK, TINY_MEDUSA, block_tensors, eagle_config, eagle_tensors, medusa_tensors

CPU = torch.device("cpu")
MODES: tuple[Mode, ...] = ("int8", "int4")
of_every_set = pytest.mark.usefixtures("kernels")


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def target(mode: Mode | None, dtype: torch.dtype = torch.bfloat16, config: ModelConfig = TINY) -> Decoder:
    return Decoder(config, held(random_tensors(config), mode), dtype, CPU)


def held(tensors: Mapping[str, Tensor], mode: Mode | None) -> Mapping[str, Tensor]:
    return Quantised(tensors, mode) if mode else tensors


# --- codes --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 100), st.sampled_from([1e-3, 0.02, 1.0, 300.0]))
def test_eight_bits_are_within_half_a_step(seed: int, out: int, width: int, scale: float) -> None:
    weight = drawn(seed, out, width, scale=scale)
    codes = quantize(weight, 8)
    assert codes.shape == (out, width)
    assert codes.codes.shape == (out, -(-width // GROUP) * GROUP)
    assert codes.offset is None
    step = codes.scale.float().repeat_interleave(GROUP, 1)[:, :width]
    # The largest value of a group is 127 steps, except for the rounding of the step to float16.
    assert bool(((codes.dequantised() - weight).abs() <= 0.5 * step * 1.13 + 4e-6).all())


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 100), st.sampled_from([1e-3, 0.02, 1.0, 300.0]))
def test_four_bits_are_better_than_even_steps_from_least_to_largest(
    seed: int, out: int, width: int, scale: float
) -> None:
    weight = drawn(seed, out, width, scale=scale)
    codes = quantize(weight, 4)
    assert int(codes.codes.max()) <= 15
    assert codes.codes.shape[1] % GROUP == 0
    for start in range(0, width, GROUP):
        group, ours = (x[:, start : start + GROUP] for x in (weight, codes.dequantised()))
        low = group.amin(1, keepdim=True)
        step = ((group.amax(1, keepdim=True) - low) / 15).clamp(min=1e-9)
        assert bool(((ours - group).abs() <= 1.5 * step + 1e-3 * group.abs()).all())
        even = ((group - low) / step).round() * step + low
        allowed = (even - group).square().sum() * 1.05 + (1e-3 * group).square().sum()
        # The padding of the last group would affect its fit.
        assert group.shape[1] < GROUP or float((ours - group).square().sum()) <= float(allowed)


def test_four_bits_lose_an_eighth_less_than_even_steps() -> None:
    weight = drawn(0, 400, GROUP)
    low = weight.amin(1, keepdim=True)
    step = (weight.amax(1, keepdim=True) - low) / 15
    even = (((weight - low) / step).round() * step + low - weight).square().sum()
    assert float((quantize(weight, 4).dequantised() - weight).square().sum()) < 0.875 * float(even)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_know_nothing_of_each_other(bits: int) -> None:
    weight = drawn(1, 5, 3 * GROUP)
    whole = quantize(weight, bits)
    weight[:, GROUP : 2 * GROUP] = 1000.0
    other = quantize(weight, bits)
    for group in (0, 2):
        assert torch.equal(whole.centred_codes(group), other.centred_codes(group))
        assert torch.equal(whole.scale[:, group], other.scale[:, group])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_padded_group_is_as_good_as_a_full_one(bits: int) -> None:
    """Padding with zeros would extend the range of weights that are far from zero."""
    weight = drawn(2, 8, 40, scale=0.01) + 5
    narrow = weight[:, GROUP:]
    error = (quantize(weight, bits).dequantised() - weight)[:, GROUP:].abs().max()
    assert float(error) <= (0.003 if bits == 4 else 0.022)
    assert torch.equal(quantize(narrow, bits).dequantised(), quantize(weight, bits).dequantised()[:, GROUP:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 0.75, -3.0])
def test_constant_groups_are_kept(bits: int, value: float) -> None:
    weight = torch.full((3, 50), value)
    assert torch.allclose(quantize(weight, bits).dequantised(), weight, rtol=5e-4)


def test_pieces_and_the_whole_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(3, 20, 70)
    whole = quantize(weight, 4)
    monkeypatch.setattr("paceline.kernels.quantize._CHUNK_WEIGHTS", 200)
    assert torch.equal(quantize(weight, 4).dequantised(), whole.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_codes_at_their_own_bits_are_the_same(bits: int) -> None:
    codes = quantize(drawn(4, 30, 64), bits)
    again = quantize(codes.dequantised(), bits)
    error = (again.dequantised() - codes.dequantised()).abs().max()
    assert float(error) < 2e-3 * float(codes.dequantised().abs().max())


def test_rows_stacks_and_more_bits_change_no_weight() -> None:
    four, eight = quantize(drawn(5, 6, 70), 4), quantize(drawn(6, 4, 70), 8)
    assert torch.equal(four.to_8_bits().dequantised(), four.dequantised())
    assert four.to_8_bits().bits == 8
    order = torch.tensor([3, 0, 0, 5])
    assert torch.equal(four[order].dequantised(), four.dequantised()[order])
    for parts, bits in (([four, four], 4), ([eight, eight], 8), ([four, eight], 8), ([eight, four, eight], 8)):
        stacked = stack(parts)
        assert stacked.bits == bits
        assert (stacked.offset is None) == (four not in parts)
        assert torch.equal(stacked.dequantised(), torch.cat([part.dequantised() for part in parts]))


# --- activations and products -------------------------------------------------------------------------------------


def test_activations_are_rounded_by_row_and_group() -> None:
    x = drawn(7, 3, 2, 40)
    steps, scale = rounded = round_activations(x)
    assert (steps.shape, scale.shape) == ((3, 2, 2, GROUP), (3, 2, 2))
    assert torch.equal(steps, steps.round())
    assert torch.equal(steps.abs().amax(-1), torch.full((3, 2, 2), 127.0))
    values = rounded.values(40)
    assert float((values - x).abs().max()) <= 0.5 * float(scale.max()) * 1.001
    x[1, 1] *= 1000
    x[0, 0, :GROUP] *= 1000
    changed = round_activations(x).values(40)
    assert torch.equal(changed[2], values[2])
    assert torch.equal(changed[0, 0, GROUP:], values[0, 0, GROUP:])


def test_activations_that_are_zero_stay_so_and_halves_go_to_even() -> None:
    x = torch.zeros(2, GROUP)
    x[1, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    steps, scale = round_activations(x)
    assert not bool(steps[0].any())
    assert steps[1, 0, :4].tolist() == [127.0, 0.0, 2.0, -2.0]
    assert float(scale[1, 0]) == 1.0


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_values_that_are_not_finite_are_not_hidden(bits: int, wrong: float) -> None:
    x = drawn(8, 2, 64)
    x[1, 40] = wrong
    y = linear(quantize(drawn(9, 5, 64), bits))(x)
    assert bool(y[0].isfinite().all())
    assert not bool(y[1].isfinite().any())


@of_every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 50, 96])
def test_a_product_of_codes_equals_the_product_of_their_weights(width: int, bits: int, dtype: torch.dtype) -> None:
    codes, bias = quantize(drawn(10, 24, width), bits), drawn(11, 24).to(dtype)
    x, residual = drawn(12, 2, 5, width).to(dtype), drawn(13, 2, 5, 24).to(dtype)
    product = linear(codes, bias)
    expected = round_activations(x).values(width).double() @ codes.dequantised().double().T + bias
    assert product(x).dtype == dtype
    assert torch.allclose(product(x).double(), expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    # A kernel may add the residual before it rounds, or after.
    ulps = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
    assert torch.allclose(product.onto(x, residual).double(), expected + residual, rtol=0, atol=ulps)
    assert torch.equal(product.weight(), codes.dequantised())


@of_every_set
@pytest.mark.parametrize("codes", [quantize(drawn(14, 300, 96), 4), quantize(drawn(15, 300, 96), 8)])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(codes: Codes) -> None:
    product = linear(codes)
    for dtype in (torch.float32, torch.bfloat16):
        x = drawn(16, 33, 96).to(dtype)
        alone = torch.cat([product(x[i : i + 1]) for i in range(len(x))])
        for count in (2, 4, 5, 16, 33):
            assert torch.equal(product(x[:count]), alone[:count])
        x[1:] *= 1000
        assert torch.equal(product(x)[0], alone[0])


# --- models -------------------------------------------------------------------------------------------------------

PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]


def row_0(model: Decoder, draft: Draft) -> Tensor:
    """Return the logits [V] of the pending token, verified with this draft."""
    cache = model.new_cache()
    slot = cache.acquire(len(PROMPT))
    rows = pack_prefix(PROMPT, slot, 0, CPU)
    model.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, len(PROMPT))])
    return model.forward(pack([7], [draft], [slot], [len(PROMPT)], CPU), cache, Want()).logits[0, 0]


@of_every_set
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draft_rows_leave_row_0_as_it_is_bit_for_bit(mode: Mode, dtype: torch.dtype) -> None:
    model = target(mode, dtype)
    tree = (0, 0, 1, 1, 2)
    for parents in ((0, 1, 2, 3, 4), tree):
        seen = row_0(model, Draft((3, 4, 5, 6, 7), parents))
        for other in ((30, 4, 5, 6, 7), (11, 12, 13, 14, 15), (36, 35, 34, 33, 32)):
            assert torch.equal(row_0(model, Draft(other, parents)), seen)


@of_every_set
@pytest.mark.parametrize("mode", MODES)
def test_more_draft_rows_leave_row_0_as_it_is_bit_for_bit(mode: Mode) -> None:
    model = target(mode)
    seen = row_0(model, Draft())
    for count in (1, 3, 4, 15, 36):
        assert torch.equal(row_0(model, Draft.chain(list(range(count)))), seen)


DRAFTERS = {
    "suffix": lambda model: Suffix(),
    "the model itself": lambda model: DraftModel(model, 37),
    "the model in float": lambda model: DraftModel(target(None), 37),
    "the model in four bits": lambda model: DraftModel(target("int4"), 37),
}


@cover(mode=MODES, draft={"chain": DraftBudget.chain(5), "tree": DraftBudget(14, 4, 3)}, name=DRAFTERS.keys())
def test_a_quantised_target_writes_its_own_plain_text(mode: Mode, draft: DraftBudget, name: str) -> None:
    model = target(mode)
    for sampling in (Sampling(max_new_tokens=40), Sampling(max_new_tokens=40, temperature=0.9, top_p=0.9, seed=5)):
        plain = run(model, PROMPT, sampling)
        drafter: Drafter = DRAFTERS[name](model)
        tokens, finish, stats = run(model, PROMPT, sampling, drafter, draft)
        assert (tokens, finish) == plain[:2]
        assert stats.drafted > 0


def logits(model: Decoder) -> Tensor:
    cache = model.new_cache()
    return model.forward(pack_prefix(PROMPT, cache.acquire(), 0, CPU), cache, Want()).logits[0]


def test_quantised_models_are_near_the_model_and_the_more_bits_the_nearer() -> None:
    exact = logits(target(None, torch.float32))
    errors = {mode: float((logits(target(mode, torch.float32)) - exact).norm() / exact.norm()) for mode in MODES}
    assert 0 < errors["int8"] < 0.1 < errors["int4"] < 0.6


UNTIED = replace(TINY, tied=False)


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("mode", MODES)
def test_embeddings_and_norms_stay_and_heads_have_eight_bits(config: ModelConfig, mode: Mode) -> None:
    tensors = random_tensors(config)
    model = target(mode, torch.float32, config)
    table = tensors["model.embed_tokens.weight"]
    head = table if config.tied else tensors["lm_head.weight"]
    assert torch.equal(model.embed(torch.arange(config.vocab_size)), table)
    assert torch.equal(model.head(), quantize(head, 8).dequantised())
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])


def test_a_quantised_head_is_lent_in_the_models_dtype() -> None:
    assert target("int8").head().dtype == torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_routers_of_experts_stay_in_float(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def seen(self: Weights, name: str, shape: tuple[int, int], bits: int) -> Codes:
        made.append((name, bits))
        return quantize(self.get(name, shape), bits)

    monkeypatch.setattr(Weights, "_matrix", seen)
    experts = MixtureConfig(3, 2, 16, normalised=True)
    config = replace(TINY, layers=1, mixture=experts, special=(replace(TINY.plan[0], sparse=True),))
    tensors = random_tensors(config)
    tensors = {name: x for name, x in tensors.items() if ".mlp." not in name}
    prefix = "model.layers.0.mlp."
    tensors[prefix + "gate.weight"] = drawn(1, 3, 32)
    for i in range(3):
        for name, shape in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16))):
            tensors[f"{prefix}experts.{i}.{name}_proj.weight"] = drawn(i, *shape)
    Decoder(config, Quantised(tensors, mode), torch.float32, CPU)
    bits = {"int8": 8, "int4": 4}[mode]
    assert prefix + "gate.weight" not in dict(made)
    assert set(made) == {
        (name, 8 if name == "model.embed_tokens.weight" else bits)
        for name in tensors
        if "norm" not in name and name != prefix + "gate.weight"
    }


def test_float64_is_refused() -> None:
    with pytest.raises(InvalidOption, match="float64"):
        target("int8", torch.float64)


def test_shapes_are_checked_of_quantised_matrices_too() -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    for wrong in (torch.zeros(32, 31), torch.zeros(32)):
        with pytest.raises(CorruptModel, match="o_proj"):
            Decoder(TINY, Quantised(random_tensors(TINY) | {name: wrong}, "int8"), torch.float32, CPU)
    tensors = random_tensors(TINY)
    del tensors[name]
    with pytest.raises(CorruptModel, match="lacks"):
        Decoder(TINY, Quantised(tensors, "int8"), torch.float32, CPU)
    with pytest.raises(CorruptModel, match="does not know"):
        Decoder(TINY, Quantised(random_tensors(TINY) | {"more.weight": torch.zeros(2, 2)}, "int8"), torch.float32, CPU)


# --- drafters -----------------------------------------------------------------------------------------------------

EAGLE, EAGLE_1 = eagle_config(), eagle_config(version=1)
HEADS = {
    "eagle-3": (lambda tensors, host: Eagle(EAGLE, tensors, host), eagle_tensors(EAGLE)),
    "eagle-1": (lambda tensors, host: Eagle(EAGLE_1, tensors, host), eagle_tensors(EAGLE_1)),
    "medusa": (lambda tensors, host: Medusa(TINY_MEDUSA, tensors, host), medusa_tensors()),
    "block": (lambda tensors, host: Block(TINY_BLOCK, tensors, host), block_tensors()),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("modes", [("int8", None), (None, "int4"), ("int4", "int8")])
def test_heads_and_targets_are_quantised_apart(
    name: str, modes: tuple[Mode | None, Mode | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, tensors = HEADS[name]
    host: TargetWithHead = target(modes[0])
    made: list[str] = []
    matrix = Weights._matrix
    monkeypatch.setattr(
        Weights, "_matrix", lambda self, *given: (made.extend([given[0]] * bool(given[2])), matrix(self, *given))[1]
    )
    drafter = make(held(tensors, modes[1]), host)
    assert bool(made) == bool(modes[1])
    sampling = Sampling(max_new_tokens=30)
    assert run(host, PROMPT, sampling, drafter)[0] == run(host, PROMPT, sampling)[0]


def test_a_head_that_borrows_rows_of_the_target_has_them_in_eight_bits() -> None:
    tensors = eagle_tensors(EAGLE)
    del tensors["lm_head.weight"]
    host = target(None)
    states = drawn(3, 4, 32).to(torch.bfloat16)
    exact, coded = (Eagle(EAGLE, held(tensors, mode), host)._net.logits(states) for mode in (None, "int4"))
    error = float((exact - coded).norm() / exact.norm())
    assert 0 < error < 0.02


# --- loading ------------------------------------------------------------------------------------------------------


def test_modes_that_are_none_are_refused_before_anything_is_read() -> None:
    for options in ({"quantize": "int3"}, {"draft_quantize": "8"}, {"draft_quantize": "int8", "drafter": "suffix"}):
        with pytest.raises(InvalidOption, match=r"quantize|suffix"):
            paceline.load("/no/such/model", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="Suffix"):
        paceline.load("/no/such/model", drafter=Suffix(), draft_quantize="int4")
    with pytest.raises(InvalidOption, match=r"None"):
        paceline.load("/no/such/model", drafter=None, draft_quantize="int4")


def test_a_model_object_is_not_quantised() -> None:
    with pytest.raises(InvalidOption, match="keeps its weights"):
        paceline.load(object(), quantize="int8")  # type: ignore[arg-type]
