"""A random decoder with a few thousand weights, and functions that run an engine without an `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.engine.stats import Stats
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.protocols import Target
from paceline.sampling.parameters import Sampling, Vocabulary
from paceline.types import DraftBudget, FinishReason

TINY = ModelConfig(
    family="llama",
    vocab_size=37,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    context_length=256,
    tied=True,
)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a Llama with this config, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden)}
    for i, own in enumerate(map(config.of, config.plan)):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        width, kv = own.heads * own.head_dim, own.kv_heads * own.head_dim
        shapes |= {attn + "q_proj.weight": (width, config.hidden), attn + "o_proj.weight": (config.hidden, width)}
        shapes |= {attn + f"{x}_proj.weight": (kv, config.hidden) for x in "kv"}
        shapes |= {attn + "sinks.weight": (config.heads,)} if config.attention.sinks else {}
        shapes |= {mlp + f"{x}_proj.weight": (own.ffn, config.hidden) for x in ("gate", "up")}
        shapes |= {mlp + "down_proj.weight": (config.hidden, own.ffn)}
    if not config.tied:
        shapes |= {"lm_head.weight": (config.vocab_size, config.hidden)}
    norms = ["model.norm"] + [
        f"model.layers.{i}.{n}_layernorm" for i in range(config.layers) for n in ("input", "post_attention")
    ]
    return shapes | {name + ".weight": (config.hidden,) for name in norms}


def random_tensors(config: ModelConfig, seed: int = 0, scale: float = 0.4) -> dict[str, Tensor]:
    """Return random weights for `config`, by Hugging Face name, in float32.

    Args:
        config: The architecture, with Llama's layers.
        seed: Seed of the normal distribution.
        scale: Standard deviation of matrices. Weights of norms are 1.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * scale if len(shape) > 1 else torch.ones(shape)
        for name, shape in tensor_shapes(config).items()
    }


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: int | bool) -> Decoder:
    """Return a random decoder with a few thousand weights.

    Args:
        seed: Seed of the weights.
        dtype: Type of the computation. In float64, rounding rarely matters.
        **changes: Fields of `TINY` to replace.
    """
    config = replace(TINY, **changes)  # type: ignore[arg-type]
    return Decoder(config, random_tensors(config, seed), dtype, torch.device("cpu"))


def run(
    target: Target,
    prompt: Sequence[int],
    sampling: Sampling,
    drafter: Drafter | None = None,
    draft: DraftBudget | None = None,
    *,
    eos: Sequence[int] = (),
    engine: Engine | None = None,
) -> tuple[list[int], FinishReason | None, Stats]:
    """Decode one prompt with an engine. Token id i decodes to `chr(i)`.

    Args:
        target: The target.
        prompt: Token ids of the prompt.
        sampling: Sampling parameters.
        drafter: The drafter; None for plain decoding.
        draft: Budget of the drafts.
        eos: EOS ids.
        engine: Engine to use instead of a new one.

    Returns:
        Token ids of the reply, the reason why it ended, and statistics.
    """
    (reply,) = run_together(engine or Engine(target, drafter, draft), [prompt], [sampling], eos=eos)
    return reply


def run_together(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    eos: Sequence[int] = (),
    adapters: Sequence[int] = (),
) -> list[tuple[list[int], FinishReason | None, Stats]]:
    """Decode several prompts in shared passes.

    Args:
        engine: The engine.
        prompts: Token ids of each prompt.
        samplings: Sampling parameters of each prompt.
        eos: EOS ids.
        adapters: Adapter number of each prompt (see `KVCache.acquire`); () for none.

    Returns:
        For each prompt, the same as `run`.
    """
    each = zip(prompts, samplings, adapters or [0] * len(prompts), strict=True)
    tasks = [Task(partial(start, engine, prompt, how, eos, adapter=number)) for prompt, how, number in each]
    for _ in Batch(engine, tasks, len(tasks)):
        pass
    requests = [task.request for task in tasks if task.request]
    return [(r.token_ids[r.num_prompt_tokens :], r.finish, r.stats) for r in requests]


def start(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    eos: Sequence[int],
    source: Request | None,
    adapter: int = 0,
) -> Request:
    """Start a request, or a fork of `source`."""
    sampler = sampling.sampler(vocabulary=Vocabulary(engine.target.vocab_size, eos))
    room = engine.target.context_length - len(prompt)
    stream = TextStream(sampling, eos, lambda ids: "".join(map(chr, ids)), room)
    return engine.start(prompt, sampler, stream, Stats(sampler.noise.seed, "rounding"), source, adapter=adapter)
