"""/props and /slots: the server's settings and load in the shapes of llama.cpp's server, read-only."""

from __future__ import annotations

from typing import Any

import paceline
from paceline.server.models import LoadedModel, ModelSource

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"),
    *("presence_penalty", "frequency_penalty", "ignore_eos", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
"""Names that the parameters have in `Sampling` and in llama.cpp."""


def properties(model: LoadedModel, source: ModelSource) -> dict[str, Any]:
    """Describe a model. Of its path only the last part is shown."""
    llm, words = model.llm, model.llm.tokenizer
    sampling = llm.sampling()
    params = {name: getattr(sampling, name) for name in _SAME}
    params |= {"repeat_penalty": sampling.repetition_penalty, "repeat_last_n": -1, "seed": -1, "n_predict": -1}
    return {
        "default_generation_settings": {"params": params, "n_ctx": llm.model.target.context_length},
        "total_slots": model.worker.limits.slots,
        "model_alias": model.name,
        "model_path": source.path.name if source.path else source.names[0],
        "modalities": {"vision": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": words.chat_template or "",
        "bos_token": words.special_tokens.get("bos_token", ""),
        "eos_token": words.special_tokens.get("eos_token", ""),
        "build_info": f"paceline-{paceline.__version__}",
    }


def slots(model: LoadedModel | None) -> list[dict[str, Any]]:
    """List a model's slots, the busy ones first, without anything of their texts; none if it is not loaded."""
    if model is None:
        return []
    worker, context = model.worker, model.llm.model.target.context_length
    running, drafts = worker.load.running, worker.default.drafter is not None
    return [
        {"id": i, "n_ctx": context, "speculative": drafts, "is_processing": i < running}
        for i in range(worker.limits.slots)
    ]
