"""The first layers of a transformers model as a separate model, for checks that would be slow with all layers."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

_KNOWN = ("torch", "transformers", "peft")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the first layers of `model`, and the same embedding and head.

    It has as few layers as possible that include every kind of layer, and one more layer after them, because a layer's
    effect on the cache shows only in a later layer. It shares the weights of `model`, which does not change.

    Return `model` itself if its list of layers is not found, or if some of its code does not come from torch,
    transformers or PEFT. Such code may treat layers differently depending on their index.
    """
    if any(type(part).__module__.partition(".")[0] not in _KNOWN for part in model.modules()):
        return model
    given = model.config.get_text_config(decoder=True)
    count = given.num_hidden_layers
    found = [name for name, part in model.named_modules() if isinstance(part, ModuleList) and len(part) == count]
    if len(found) != 1:
        return model
    layers = model.get_submodule(found[0])
    types = getattr(given, "layer_types", None) or [""] * count
    kinds = [(kind, *_kind(layer)) for kind, layer in zip(types, layers, strict=True)]
    keep = min(count, 2 + max(map(kinds.index, kinds)))
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:keep]
    text.num_hidden_layers = keep
    configs = {id(model.config): config, id(given): text}
    *path, last = found[0].split(".")
    short = part = _twin(model, configs)
    for name in path:
        part._modules[name] = part = _twin(part._modules[name], configs)
    part._modules[last] = ModuleList(layers[:keep])
    return short


def _twin(module: Any, configs: dict[int, Any]) -> Any:
    """Return a module that shares everything with `module` except the table of submodules and the config."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    if (config := configs.get(id(getattr(module, "config", None)))) is not None:
        twin.config = config
    return twin


def _kind(layer: Module) -> tuple[Any, ...]:
    """Return a key that differs between layers that compute differently. It consists of classes, settings, and the
    shapes and devices of weights."""
    return tuple(
        (name, type(part), sorted(map(str, _settings(part).items())), sorted(vars(part)))
        for name, part in layer.named_modules()
    )


def _settings(part: Module) -> dict[str, Any]:
    plain = {key: x for key, x in vars(part).items() if key != "layer_idx" and _is_plain(x)}
    weights = {key: (x.shape, x.dtype, x.device) for key, x in part._parameters.items() if x is not None}
    # Treat hooks with the same code as equal.
    hooks = {key: [getattr(hook, "__qualname__", type(hook)) for hook in vars(part)[key].values()] for key in _HOOKS}
    return {**plain, **weights, **hooks}


def _is_plain(x: object) -> bool:
    return (
        x is None or isinstance(x, bool | int | float | str) or (isinstance(x, list | tuple) and all(map(_is_plain, x)))
    )
