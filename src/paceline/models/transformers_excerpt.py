"""The first layers of a model of transformers as a model of its own, for checks that all layers would make slow."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import Module, ModuleList
from transformers import PreTrainedModel


def first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the fewest first layers that have one of each kind, with the same embedding and head.

    It has one layer more, if there is one, since a layer does not see what it did itself. It shares the weights of
    `model`, which is not changed. Returns `model` itself if its list of layers is not found.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [name for name, part in model.named_modules() if isinstance(part, ModuleList) and len(part) == count]
    if len(found) != 1:
        return model
    layers = model.get_submodule(found[0])
    kinds = [_kind(layer) for layer in layers]
    keep = min(count, 2 + max(map(kinds.index, kinds)))
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:keep]
    text.num_hidden_layers = keep
    configs = {id(model.config): config, id(model.config.get_text_config(decoder=True)): text}
    *path, last = found[0].split(".")
    short = part = _twin(model, configs)
    for name in path:
        part._modules[name] = part = _twin(part._modules[name], configs)
    part._modules[last] = ModuleList(layers[:keep])
    return short


def _twin(module: Any, configs: dict[int, Any]) -> Any:
    """Return a module that shares everything with this one but its table of submodules and its config."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    if (config := configs.get(id(getattr(module, "config", None)))) is not None:
        twin.config = config
    return twin


def _kind(layer: Module) -> tuple[Any, ...]:
    """Return what tells layers apart that compute differently: classes, settings, and shapes and places of weights."""
    return tuple(
        (name, type(part), sorted(map(str, _settings(part).items())), sorted(vars(part)))
        for name, part in layer.named_modules()
    )


def _settings(part: Module) -> dict[str, Any]:
    plain = {key: x for key, x in vars(part).items() if x is None or isinstance(x, bool | int | float | str)}
    weights = {key: (x.shape, x.dtype, x.device) for key, x in part._parameters.items() if x is not None}
    return {**{key: x for key, x in plain.items() if key != "layer_idx"}, **weights}
