"""Stock pipelines with fake weights: their own code runs, with true shapes and dtypes.

Every weight is a tensor without storage (torch's FakeTensor), and so is everything computed from
one. All else is real: schedules, tokens, masks, noise, images. So a model of any size is built and
called within seconds, and no weight file is read.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from flowgrpo.core.errors import ConfigError
from flowgrpo.core.sections import ModelConfig
from flowgrpo.pipelines.loading import configured_scheduler
from flowgrpo.pipelines.seams import patched

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.jinja2"]
"""Patterns of the files downloaded for a hub name: configurations and tokenizers."""


@contextmanager
def fake_weights(*, building: bool = False) -> Iterator[None]:
    """Within the block, torch accepts tensors without storage next to real ones.

    Args:
        building: `torch.empty` returns tensors without storage, too: this is how models under
            construction and new adapters allocate their weights.
    """
    with patched(nn.Module, "_apply", _apply), _FakeWeights(building):
        yield


class _FakeWeights(TorchDispatchMode):
    """Handles operations that FakeTensor refuses because they need a value: a number is NaN, a
    condition is false, and two tensors are equal."""

    def __init__(self, building: bool):
        super().__init__()
        self.building = building

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(cls, FakeTensor) for cls in types):
            if func is torch.ops.aten._local_scalar_dense.default:
                return _value_unknown(args[0])
            if func is torch.ops.aten.equal.default:
                return True
            if func in _INDEXING:
                args = (args[0], _without_masks(args[1]), *args[2:])
        elif self.building and func is torch.ops.aten.empty.memory_format and all(args[0]):
            with _FAKES:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_FAKES = FakeTensorMode(allow_non_fake_inputs=True)


_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


def open_with_fake_weights(config: ModelConfig) -> Any:
    """The pipeline of a config with fake weights, on the CPU.

    Raises:
        ConfigError: `model.path` is missing, or the scheduler is unknown.
        Exception: a part cannot be built from its configuration; whatever its library raises.
    """
    if config.path is None:
        raise ConfigError("model.path is missing; name a pipeline folder or a hub name.")
    folder = _folder_of(config.path)
    index = json.loads((folder / DiffusionPipeline.config_name).read_text())
    cls = getattr(diffusers, index["_class_name"])
    taken = inspect.signature(cls.__init__).parameters
    # Not with from_pretrained, which loads the weights of optional parts even if they are passed.
    pipe = cls(
        **{
            name: _part(value[0], value[1], folder / name, getattr(torch, config.dtype))
            if _names_a_class(value)
            else (None if value == [None, None] else value)
            for name, value in index.items()
            if name in taken
        }
    )
    if config.scheduler or config.scheduler_kwargs:
        pipe.scheduler = configured_scheduler(pipe, config)
    return pipe


def _folder_of(path: str) -> Path:
    """The pipeline's folder; for a hub name, a download of its small files only."""
    folder = Path(path).expanduser()
    if (folder / DiffusionPipeline.config_name).is_file():
        return folder
    if folder.exists() or path.startswith((".", "/", "~")):
        raise ValueError(f'model.path is "{path}", but that is not a pipeline folder')
    return Path(snapshot_download(path, allow_patterns=SMALL_FILES))


def _names_a_class(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def _part(library: str, class_name: str, folder: Path, dtype: torch.dtype) -> Any:
    """A part of a pipeline: a model with fake weights, or anything else as it is."""
    cls = simple_get_class_obj(library, class_name)
    return _model(cls, folder, dtype) if issubclass(cls, nn.Module) else cls.from_pretrained(folder)


def _model(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A model built from its configuration, in the dtypes in which its library would load it."""
    with fake_weights(building=True):
        if issubclass(cls, PreTrainedModel):
            model = cls._from_config(cls.config_class.from_pretrained(folder), dtype=dtype)
            patterns = [re.compile(p.replace("*", ".*")) for p in model._get_dtype_plan(dtype)]

            def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
                return torch.float32 if any(p.search(name) for p in patterns) else tensor.dtype
        elif issubclass(cls, ModelMixin):
            model = cls.from_config(cls.load_config(folder))
            in_float32 = set(cls._keep_in_fp32_modules or [])

            def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
                return torch.float32 if in_float32 & {*name.split(".")} else dtype
        else:
            raise ValueError(f"{cls.__name__} is a model of neither diffusers nor transformers")
        if getattr(model.config, "quantization_config", None):
            raise ValueError(f"{folder.name} is quantized")
        _cast(model, dtype_of)
    return model.eval()


def _cast(model: nn.Module, dtype_of: Callable[[str, Tensor], torch.dtype]) -> None:
    """Replaces every tensor that a weight file holds by one without storage, in its dtype."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for name in model.state_dict(keep_vars=True):
        module_name, _, key = name.rpartition(".")
        part = model.get_submodule(module_name)
        store: dict[str, Any] = part._parameters if key in part._parameters else part._buffers
        tensor = store.get(key)
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) not in replaced:
            dtype = dtype_of(name, tensor) if tensor.is_floating_point() else tensor.dtype
            replaced[id(tensor)] = (_like(tensor, dtype), tensor)
        store[key] = replaced[id(tensor)][0]


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor or parameter like `tensor`, but without storage."""
    with _FAKES:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stands in for `nn.Module._apply`, which moves and casts, but makes new parameters: torch's
    own swaps the two tensors, which fails because there are weak references to a FakeTensor."""
    for part in self.modules() if recurse else [self]:
        for name, parameter in part._parameters.items():
            if parameter is not None and (moved := fn(parameter)) is not parameter:
                new = nn.Parameter(moved.detach(), requires_grad=parameter.requires_grad)
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else fn(buffer)
    return self


def _value_unknown(scalar: Tensor) -> bool | float:
    return False if scalar.dtype == torch.bool else float("nan")


def _without_masks(indices: Any) -> list[Any]:
    """The indices with each real mask replaced by the positions it selects: the shape of the result
    depends on their number."""
    positions: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        if is_mask and not isinstance(index, FakeTensor):
            positions.extend(index.nonzero(as_tuple=True))
        else:
            positions.append(index)
    return positions
