"""Loading a model: from a reference to a running target."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.cache.kv_types import KVType, check_kv_type, kv_dtype
from paceline.checkpoints.adapters import Adapter, read_factors
from paceline.checkpoints.checkpoint import Checkpoint, eos_token_ids
from paceline.checkpoints.lora import MergedTensors, open_model
from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.mtp import has_mtp
from paceline.checkpoints.registry import FAMILIES
from paceline.checkpoints.vision import open_vision
from paceline.errors import InvalidOption, UnsupportedModel, install_line, memory_named
from paceline.files.progress import progress_bar
from paceline.kernels.cpu.build import library
from paceline.kernels.cuda import has_triton
from paceline.kernels.linear import fast_bfloat16, packs_bfloat16
from paceline.kernels.low_rank import Factors
from paceline.kernels.quantize import Mode, Precision, check_precision
from paceline.kernels.threads import limit_threads
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.decoder import Decoder, Progress
from paceline.models.divided import DividedDecoder
from paceline.models.lazy import Outlines, Quantised, mostly_codes
from paceline.models.mirror import Mirror
from paceline.models.placement import DeviceMap, Devices, free_memory, parse_map, place, plan, sizes
from paceline.models.ranks import Ranks
from paceline.models.refusals import refuse_other_heads, refuse_other_kinds
from paceline.protocols import Adaptable, Target
from paceline.text.tokenizer import Tokenizer
from paceline.vision.encoder import Vision

_LOG = logging.getLogger("paceline")

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
HeadTokens = Callable[[Tokenizer, int], Tensor | None]
"""(a draft model's tokenizer, its vocabulary size) -> the token ids that its output head keeps, in ascending order, or
None to keep all tokens."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model.

    Attributes:
        target: The target.
        tokenizer: The model's tokenizer.
        eos: The model's EOS ids.
        generation: Contents of generation_config.json.
        path: The model's folder or GGUF file.
        quantize: How the weights are quantised. None if they are not.
        head_tokens: The token ids that a draft model's output head has kept, in ascending order. None for all tokens.
        has_mtp: True if the model's files also hold an MTP layer.
        vision: The vision tower. None if the model takes no images, or if Paceline cannot run its tower.
    """

    target: Target
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    generation: dict[str, Any]
    path: Path
    quantize: Mode | None = None
    head_tokens: Tensor | None = None
    has_mtp: bool = False
    vision: Vision | None = None

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters that requests may use."""
        return self.target.adapters if isinstance(self.target, Adaptable) else ()

    def adapter_number(self, name: str | None) -> int:
        """Return an adapter's number (see `KVCache.acquire`), which is 0 for None. Raise `InvalidOption` if it is not
        loaded."""
        names = ["", *self.adapters]
        if (name or "") not in names:
            raise InvalidOption(f"no adapter {name!r} is loaded", f"Loaded adapters: {', '.join(names[1:]) or 'none'}")
        return names.index(name or "")


def load_model(
    reference: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: DType = "auto",
    device: Device = "auto",
    quantize: Precision = "none",
    kv_type: KVType = "auto",
    revision: str | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    progress: bool = False,
    exact: bool = False,
    head_tokens: HeadTokens | None = None,
    adapters: Mapping[str, Adapter] | None = None,
    device_map: DeviceMap | None = None,
    tensor_parallel: bool = False,
    mmproj: str | Path | None = None,
) -> Loaded:
    """Load a model. `paceline.load` describes the arguments.

    If `head_tokens` is given, the model is a draft model, whose precision does not affect any text. Raise
    `PacelineError` if the model cannot be loaded.
    """
    began = time.perf_counter()
    check_precision(quantize)
    check_kv_type(kv_type)
    limit_threads()
    fetch: dict[str, Any] = {"token": token, "allow_pickle": allow_pickle}
    place = _LoadDevices.chosen(device, device_map, tensor_parallel, drafts=head_tokens is not None)
    where, parts, mirror = place.first, place.parts, place.mirror
    with place.in_turn():  # rank 0 downloads the model and compiles the kernels before the other ranks look for them
        with progress_bar("compiling the CPU kernels, once", progress):
            pick_dtype(dtype, where)  # compile the kernels, and raise errors, before anything is downloaded
        checkpoint = open_model(reference, adapter, revision=revision, quiet=not progress, **fetch)
    config = native_config(checkpoint)
    check_divisible(str(reference), config, exact, mirror is not None, parts is not None)
    kind = pick_dtype(dtype, where, by_torch=config is None)
    _check_possible(str(reference), config is not None, quantize, bool(adapters), exact and where.type == "cuda")
    stored = _stored_type(kv_type, kind, config is not None, [where, *map(pick_device, parts or ())])
    with place.in_turn():
        factors = [read_factors(name, one, checkpoint.config, **fetch) for name, one in (adapters or {}).items()]
    mode = held_precision(config, checkpoint.tensors, quantize, dtype, where, drafts=head_tokens is not None)
    tensors = Quantised(checkpoint.tensors, mode, requantise=head_tokens is not None) if mode else checkpoint.tensors
    reduces = head_tokens if where.type == "cpu" else None
    kept = reduces(checkpoint.tokenizer, config.vocab_size) if reduces and config else None
    too_large = memory_named(f"{reference} does not fit on {where} in {kind}", "Use a smaller dtype or model")
    with too_large, progress_bar(f"loading {reference}", progress) as advance:
        if config is None:
            target: Target = _transformers_target(checkpoint, kind, where)
        else:
            target = place.decoder(config, tensors, mode, kind, stored, factors, kept, exact, advance)
    eos = eos_token_ids(checkpoint.config, checkpoint.generation, checkpoint.tokenizer)
    line = "%s: loaded as %s on %s (%s) in %.1f s"
    _LOG.debug(line, checkpoint.path, mode or kind, where, type(target).__name__, time.perf_counter() - began)
    if mirror:
        mirror.follow()
    mtp = config is not None and has_mtp(checkpoint.tensors)
    sees = config is not None and not (mirror or head_tokens)
    vision = open_vision(checkpoint.path, kind, where, allow_pickle, config, mmproj) if sees else None
    return Loaded(target, checkpoint.tokenizer, eos, checkpoint.generation, checkpoint.path, mode, kept, mtp, vision)


@dataclass(frozen=True, slots=True)
class _LoadDevices:
    """The devices and processes that hold a model.

    Attributes:
        first: The device of the first layer.
        parts: Device -> number of layers. An empty dict places layers by free memory. None places all
            layers on `first`.
        mirror: Repeats calls on all ranks. None for a single process.
    """

    first: torch.device
    parts: dict[str, int | None] | None
    mirror: Mirror | None

    @staticmethod
    def chosen(device: Device, device_map: DeviceMap | None, tensor_parallel: bool, drafts: bool) -> _LoadDevices:
        """Return the devices and processes that the options ask for. `drafts`: True for a draft model, for
        which a map overrides `device`."""
        mirror = Mirror(Ranks()) if tensor_parallel else None
        parts = _checked_map(device_map, "auto" if drafts else device)
        first = pick_device(next(iter(parts), "auto") if parts is not None else device)
        return _LoadDevices(mirror.ranks.device(first) if mirror else first, parts, mirror)

    def decoder(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        mode: Mode | None,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        adapters: Sequence[Factors],
        head_tokens: Tensor | None,
        exact: bool,
        advance: Progress,
    ) -> Decoder:
        """Build a native model on these devices. `mode`: How the weights are quantised. `Decoder` describes the other
        arguments."""
        if self.mirror:
            return DividedDecoder(config, tensors, dtype, self.first, advance, self.mirror, adapters, kv_dtype)
        devices = () if self.parts is None else _placement(self.parts, config, tensors, mode, dtype)
        first, make = (devices or (self.first,))[0], _decoder(exact, self.first)
        return make(config, tensors, dtype, first, advance, head_tokens, adapters, devices, kv_dtype)

    def in_turn(self) -> AbstractContextManager[None]:
        """Return a context that ranks enter one after the other, beginning with rank 0."""
        return self.mirror.ranks.one_by_one() if self.mirror else nullcontext()


def _checked_map(given: DeviceMap | None, device: Device) -> dict[str, int | None] | None:
    """Parse a device map, and check that its devices are available. Return an empty map for "auto", and None if there
    is no map."""
    if given is None:
        return None
    if device != "auto":
        raise InvalidOption("both a device map and a device were given", "Give only one of them")
    parts = parse_map(given)
    for name in parts:
        pick_device(name)
    return parts


def check_divisible(reference: str, config: ModelConfig | None, exact: bool, ranks: bool, placed: bool) -> None:
    """Raise an error if a model cannot be split across processes (`ranks`) or devices (`placed`) as requested.

    Raises:
        InvalidOption: If both were requested.
        UnsupportedModel: If the model or its options do not allow the split.
    """
    if not (ranks or placed):
        return
    if ranks and placed:
        raise InvalidOption("tensor parallelism and a device map cannot be combined", "Use one of them")
    if config is None or exact:
        what = "with exact=True" if config else "through transformers"
        raise UnsupportedModel(f"{reference} is loaded {what} and cannot be split", "Use one process and one device")
    if (
        any(layer != LayerConfig(layer.rope, layer.window, sparse=layer.sparse) for layer in config.plan)
        or config.token_inputs
        or (config.mixture and config.mixture.with_dense)
    ):
        raise UnsupportedModel(
            f"{reference} has recurrent layers, layers of several sizes, or chunked attention, and cannot be split",
            "Use one process and one device",
        )
    if ranks and config.attention.latent:
        raise UnsupportedModel(
            f"{reference} uses MLA, whose latent vector cannot be split across processes",
            "Use one process. A device map places whole layers",
        )
    if ranks and config.norms.heads in ("joint", "own"):
        how = "across heads" if config.norms.heads == "joint" else "with a weight for each head"
        raise UnsupportedModel(
            f"{reference} applies QK-norm {how}, which tensor parallelism does not support",
            "Use one process. A device map places whole layers",
        )


def _placement(
    parts: Mapping[str, int | None],
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    mode: Mode | None,
    dtype: torch.dtype,
) -> Devices:
    """Return the device of each layer. Without a map, the layers are placed by free memory."""
    if parts:
        return place(parts, config.layers)
    # Bytes per weight: codes, and the scale and offset of each group of 32 weights.
    matrix = {"int8": 34 / 32, "int4": 20 / 32}[mode] if mode else dtype.itemsize
    return plan(*sizes(tensors, config.layers, matrix, dtype.itemsize), free_memory())


def _check_possible(reference: str, native: bool, quantize: Precision, adapted: bool, exact_kernels: bool) -> None:
    """Raise `UnsupportedModel` for options that do not work with a model.

    Args:
        reference: The model.
        native: True if the model runs natively, False if it runs through transformers.
        quantize: The requested quantisation.
        adapted: True if adapters are requested.
        exact_kernels: True if the model runs on the kernels of the exact mode on CUDA.
    """
    if quantize in ("int8", "int4") and not native:
        raise UnsupportedModel(
            f"{reference} runs through transformers, whose weights are not quantised here",
            "Leave quantize out, or use a model that Paceline runs natively (`paceline info` shows this)",
        )
    if adapted and not native:
        raise UnsupportedModel(
            "this model runs through transformers, which does not support `adapters`",
            "Give load a PeftModel of the peft package, or merge the adapter",
        )
    if adapted and exact_kernels:
        raise UnsupportedModel(
            "exact=True on a CUDA device does not support adapters", "Leave out exact, or merge the adapter"
        )


def _stored_type(kv_type: KVType, dtype: torch.dtype, native: bool, devices: Sequence[torch.device]) -> torch.dtype:
    """Return the dtype of keys and values.

    Args:
        kv_type: The requested type.
        dtype: The model's dtype.
        native: True if the model runs natively, False if it runs through transformers.
        devices: The model's devices.

    Raises:
        InvalidOption: If keys and values cannot have another dtype than the model.
    """
    stored = kv_dtype(kv_type, dtype)
    if stored == dtype:
        return stored
    if not native:
        raise InvalidOption(
            "this model runs through transformers, which keeps keys and values in the model's dtype",
            "Leave kv_type out, or choose the dtype with --dtype",
        )
    if other := next((device for device in devices if device.type != "cpu"), None):
        raise InvalidOption(
            f"on {other}, keys and values have the model's dtype",
            "Leave kv_type out, use device='cpu', or dtype='bfloat16' or 'float16' for half the memory of float32",
        )
    return stored


def held_precision(
    config: ModelConfig | None,
    tensors: Mapping[str, Tensor],
    quantize: Precision,
    dtype: DType,
    device: torch.device,
    drafts: bool = False,
) -> Mode | None:
    """Return how float matrices are quantised, or None if they are not quantised.

    By default, a GGUF file keeps its own codes, which are smaller than floats, and faster if there are kernels for
    them. A draft model is quantised to 4 bits if there are kernels. This is the fastest precision that keeps 97% of
    the acceptance (benchmarks/results/2026-11-23-drafts.md).

    Args:
        config: The native config. None if transformers runs the model.
        tensors: The checkpoint's tensors.
        quantize: The requested quantisation.
        dtype: The requested dtype.
        device: The model's device.
        drafts: True if the model is a draft model.
    """
    if quantize in ("int8", "int4"):
        return quantize
    if drafts and quantize == dtype == "auto" and config and device.type == "cpu" and library():
        return "int4"
    if quantize == dtype == "auto" and config and device.type == "cpu" and mostly_codes(tensors):
        return "int8" if library() else None
    return None


def _decoder(exact: bool, device: torch.device) -> Callable[..., Decoder]:
    """Return the decoder class of a native model. With `exact`, CUDA uses Paceline's own kernels."""
    if not exact or device.type != "cuda":
        return Decoder
    if not has_triton():
        raise InvalidOption("exact=True on a CUDA device needs Triton", "Install it: pip install triton")
    from paceline.models.cuda_decoder import DeviceDecoder

    return partial(DeviceDecoder, exact=True)


def native_config(checkpoint: Checkpoint) -> ModelConfig | None:
    """Return the native decoder's config, or None for a model that runs through transformers. No tensor is read.

    Raises:
        UnsupportedModel: If neither Paceline nor transformers can run the model.
        CorruptModel: If the config is invalid, or tensor names and shapes do not fit it.
    """
    where = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
    refuse_other_kinds(checkpoint.config, where, FAMILIES)
    refuse_other_heads(checkpoint.config, where)
    try:
        config = read_config(checkpoint.config, where)
    except UnsupportedModel as error:
        if checkpoint.path.is_file():
            raise
        if find_spec("transformers") is None:
            raise UnsupportedModel(
                error.cause + " by Paceline's own decoder",
                f"Run it through transformers: {install_line('transformers')}",
            ) from error
        _check_other(checkpoint, error)
        return None
    # Build the decoder without data, to check the names and shapes of all tensors.
    Decoder(config, Outlines(checkpoint.tensors), torch.float32, torch.device("meta"))
    return config


def _check_other(checkpoint: Checkpoint, ours: UnsupportedModel) -> None:
    """Raise `UnsupportedModel` if transformers cannot run the model either. `ours` is the native decoder's error."""
    from paceline.models.transformers import check_config

    try:
        check_config(checkpoint.path)
    except UnsupportedModel as error:
        if checkpoint.config["model_type"] not in FAMILIES:
            raise
        raise UnsupportedModel(f"{ours.cause}, and {error.cause}", ours.fix) from error


def _transformers_target(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Target:
    from paceline.models.transformers import from_pretrained

    if isinstance(checkpoint.tensors, MergedTensors):
        raise UnsupportedModel(
            f"{checkpoint.path} runs through transformers, where a LoRA adapter is not merged at load",
            "Merge it with peft's merge_and_unload, and load the result",
        )
    return from_pretrained(checkpoint.path, dtype, device)


def pick_device(device: Device | str | torch.device) -> torch.device:
    """Return a torch device. "auto" is CUDA if available, then MPS, then the CPU.

    Raises:
        InvalidOption: If the device is unknown or not available.
    """
    device, _, index = str(device).partition(":")
    if index and not (index.isdecimal() and device == "cuda" and int(index) < torch.cuda.device_count()):
        raise InvalidOption(f"device {device}:{index} is not available here", "Choose cpu or auto")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        device = "cuda" if available["cuda"] else "mps" if available["mps"] else "cpu"
    if device not in available:
        raise InvalidOption(f"device {device!r} is unknown", "Choose auto, cpu, cuda or mps")
    if not available[device]:
        raise InvalidOption(f"device {device!r} is not available here", "Choose cpu or auto, or install torch for it")
    return torch.device(f"{device}:{index}" if index else device)


def pick_dtype(dtype: DType, device: torch.device, *, by_torch: bool = False) -> torch.dtype:
    """Return a torch dtype. "auto" is bfloat16 if the device is fast with it, float16 on MPS, and float32 otherwise.

    Args:
        dtype: The requested dtype.
        device: The model's device.
        by_torch: True if the model runs through transformers, without Paceline's kernels.

    Raises:
        InvalidOption: If the dtype is unknown.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    if dtype != "auto":
        if dtype not in known:
            raise InvalidOption(f"dtype {dtype!r} is unknown", f"Choose auto, {', '.join(known)}")
        return known[dtype]
    if device.type == "mps":
        return torch.float16
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = packs_bfloat16() if by_torch else fast_bfloat16()
    return torch.bfloat16 if fast else torch.float32
