"""Save and load states as a folder with one file per rank, through ``torch.distributed.checkpoint``."""

import io
import warnings
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rlbatch.distributed.whole import reshard
from lightning_rlbatch.strategies.atomic import reading, save_bytes, sync_folder
from lightning_rlbatch.strategies.checkpoint_paths import METADATA as METADATA
from lightning_rlbatch.strategies.state import check_names, param_groups, parameters_by_id

_MODEL = "state_dict"
_EXTRA = "extra_state"  # entries of the model's state dict that are no tensors


def sharded_model_state(module: nn.Module) -> dict[str, Any]:
    """Return this rank's shards of a module's state dict.

    Args:
        module: The LightningModule.
    """
    reshard(module)
    return dict(module.state_dict())


def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's shards of an optimizer's state, by parameter name.

    Args:
        module: The LightningModule, for the names.
        optimizer: One of its optimizers.

    Returns:
        ``state`` holds tensors, ``other_state`` the entries that are none, ``param_groups`` the options of each group.
    """
    names = _names(module)
    state: dict[str, dict[str, Any]] = {}
    other: dict[str, dict[str, Any]] = {}
    for _, parameter in parameters_by_id(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            (state if isinstance(value, Tensor) else other).setdefault(names[id(parameter)], {})[key] = value
    return {"state": state, "other_state": other, "param_groups": param_groups(optimizer)}


def sharded_metadata(checkpoint: Mapping[str, Any]) -> bytes:
    """Return what all ranks hold of a checkpoint, as the content of its metadata file: training cannot change it any more.

    Args:
        checkpoint: A Lightning checkpoint whose states come from the functions above.
    """
    extra = {name: value for name, value in checkpoint[_MODEL].items() if not isinstance(value, Tensor)}
    optimizers = [{key: value for key, value in state.items() if key != "state"} for state in checkpoint.get("optimizer_states", [])]
    rest = {key: value for key, value in checkpoint.items() if key != _MODEL}
    content = io.BytesIO()
    torch.save({**rest, _EXTRA: extra, "optimizer_states": optimizers}, content)
    return content.getvalue()


def save_sharded_state(
    checkpoint: Mapping[str, Any], folder: Path, metadata: bytes | None, *, background: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Write a checkpoint into an empty folder; collective.

    The metadata file comes last: a folder that has one is complete, whatever ended the process that wrote it.

    Args:
        checkpoint: A Lightning checkpoint whose states come from the functions above.
        folder: Exists on every rank.
        metadata: From :func:`sharded_metadata` on the one rank that writes it, None on the others.
        background: None writes before returning. A group of all ranks for host memory that nobody else uses copies the tensors and
            writes them in a thread, so that training may go on.

    Returns:
        Waits until all ranks have written, and the metadata file and its rank's other files are on disk; may be called in any thread.
    """
    tensors: dict[str, Any] = {_MODEL: {name: value for name, value in checkpoint[_MODEL].items() if isinstance(value, Tensor)}}
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        tensors[f"optimizer_{index}"] = {"state": optimizer["state"]}
    writing = None
    if background is None:
        save(tensors, checkpoint_id=str(folder))
    else:
        writing = cast("Future[Any]", async_save(tensors, checkpoint_id=str(folder), process_group=background))

    def finish() -> None:
        if writing is not None:
            writing.result()
        if metadata is not None:
            sync_folder(folder)
            save_bytes(metadata, folder / METADATA)

    return finish


def load_sharded_state(folder: Path, module: nn.Module, optimizers: list[Optimizer], meta: Mapping[str, Any], *, strict: bool) -> None:
    """Load a folder into a module and its optimizers, whatever the world size that wrote it; collective.

    Args:
        folder: What :func:`save_sharded_state` wrote.
        module: The LightningModule.
        optimizers: Its optimizers; none if only the model is wanted.
        meta: Content of the folder's metadata file.
        strict: Whether the module's names must all be in the checkpoint and the other way round.

    Raises:
        RuntimeError: Names disagree; names some of them.
    """
    reshard(module)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    check_names(module, own.keys(), {key.removeprefix(f"{_MODEL}.") for key in stored if key.startswith(f"{_MODEL}.")}, strict=strict)
    wanted: dict[str, Tensor] = {f"{_MODEL}.{name}": value for name, value in own.items() if f"{_MODEL}.{name}" in stored}
    names = _names(module)
    states = []
    for index, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Any]] = {}
        by_name = _optimizer_keys(stored, f"optimizer_{index}.state.", set(names.values()))
        for number, parameter in parameters_by_id(optimizer):
            name = names[id(parameter)]
            tensors = {key: _empty(stored[full], parameter) for key, full in by_name.get(name, {}).items()}
            wanted |= {by_name[name][key]: value for key, value in tensors.items()}
            if entries := tensors | meta["optimizer_states"][index]["other_state"].get(name, {}):
                state[number] = entries
        states.append(state)
    with torch.no_grad(), reading(folder):
        load(wanted, checkpoint_id=str(folder))
    for optimizer, state, rest in zip(optimizers, states, meta["optimizer_states"]):
        optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})
    if extra := meta.get(_EXTRA):
        module.load_state_dict(extra, strict=False)


def read_meta(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return what all ranks held of a checkpoint: everything but tensors of models and optimizers.

    Args:
        folder: What :func:`save_sharded_state` wrote.
        weights_only: False trusts other objects than tensors and plain values.

    Raises:
        RuntimeError: It is damaged.
    """
    with reading(folder):
        meta: dict[str, Any] = torch.load(folder / METADATA, map_location="cpu", weights_only=weights_only)
        return meta


def outline(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint like that of one file, whose tensors have their names, shapes and dtypes but neither values nor memory.

    Args:
        folder: What :func:`save_sharded_state` wrote.
        meta: Its metadata.
    """
    with reading(folder):
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key.removeprefix(f"{_MODEL}."): torch.zeros((), dtype=entry.properties.dtype).expand(entry.size)
        for key, entry in stored.items()
        if key.startswith(f"{_MODEL}.") and isinstance(entry, TensorStorageMetadata)
    }
    return {**meta, _MODEL: state | meta.get(_EXTRA, {})}


def fill_alone(folder: Path, state: Mapping[str, Any], names: Set[str]) -> None:
    """Read tensors of a model in place, in this process alone, whatever ranks wrote them.

    Args:
        folder: What :func:`save_sharded_state` wrote.
        state: A module's state dict; whole tensors.
        names: Those of its tensors that the folder has.

    Raises:
        RuntimeError: The folder is damaged.
    """
    wanted = {f"{_MODEL}.{name}": value.detach() for name, value in state.items() if name in names and isinstance(value, Tensor)}
    with reading(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
        load(wanted, checkpoint_id=str(folder), no_dist=True)


def _optimizer_keys(stored: Mapping[str, Any], prefix: str, names: set[str]) -> dict[str, dict[str, str]]:
    """Return for each parameter its state's names, and the keys under which they are stored."""
    found: dict[str, dict[str, str]] = {}
    for key in stored:
        if key.startswith(prefix):
            name, _, entry = key.removeprefix(prefix).rpartition(".")
            if name in names:
                found.setdefault(name, {})[entry] = key
    return found


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _empty(stored: Any, parameter: Tensor) -> Tensor:
    """Return a tensor to load into, sharded like the parameter if it has its shape."""
    assert isinstance(stored, TensorStorageMetadata)
    dtype = stored.properties.dtype
    if isinstance(parameter, DTensor) and stored.size == parameter.shape and len(stored.size):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(stored.size, dtype=dtype)
