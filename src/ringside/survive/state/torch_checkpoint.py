"""A directory of torch.distributed.checkpoint: written by DCP itself, read without running anything that lies in it.

DCP keeps where tensors lie, and what shape they have, in pickles, which can ask for any function to be called. Whoever
can write the directory could have it call what they like. So what such a pickle names is looked up in a list of what
DCP writes, and comes back as a plain value or an object without methods; nothing of torch or anybody else is called.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import stat
import sys
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch.storage import _storage_type_to_dtype_map

METADATA = ".metadata"


def _layout(name: object) -> str:
    if not isinstance(name, str):  # text of it could be longer than any memory
        raise pickle.UnpicklingError("a layout is named by a word")
    return name


_DATA = re.compile(r"__\d+_\d+\.distcp")
_MOST_METADATA_BYTES = 1 << 28
_OBJECTS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Do what `dcp.save` does on the only rank of a job, which it cannot do without a warning."""
    # Imported here: it takes a second and more, and what only reads needs none of it.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer, planner = FileSystemWriter(path, sync_files=True), DefaultSavePlanner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that `write` wrote, by name.

    Raises:
        Exception: The files are torn, or hold something else; of whatever type reading them came upon.
    """
    with open_file(path / METADATA) as file:
        metadata = _Plain(io.BytesIO(file.read(_MOST_METADATA_BYTES))).load()
    return {index.fqn: _tensor(path, stored) for index, stored in metadata.storage_data.items()}


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; a link, a pipe or a device is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path.name} is no file")
    return os.fdopen(fd, "rb")


def _tensor(path: Path, stored: Any) -> torch.Tensor:
    """Return a tensor of those that lie in a file one behind the other, each as `torch.save` writes it."""
    if not _DATA.fullmatch(stored.relative_path):
        raise ValueError(f"a tensor in {stored.relative_path}")
    with open_file(path / stored.relative_path) as file:
        if not 0 <= stored.offset <= stored.offset + stored.length <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{stored.relative_path} is cut")
        file.seek(stored.offset)
        archive = zipfile.ZipFile(io.BytesIO(file.read(stored.length)))
    parts = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in parts.values()):
        raise ValueError("a compressed tensor")
    if "byteorder" in parts and archive.read(parts["byteorder"]).decode() != sys.byteorder:
        raise ValueError("a tensor of a machine with another byte order")
    made_of = _Plain(io.BytesIO(archive.read(parts["data.pkl"]))).load().arguments
    (_, dtype, key, *_), first, shape, strides, *_, last = made_of
    memory, dtype = bytearray(archive.read(parts[f"data/{key}"])), last if isinstance(last, torch.dtype) else dtype
    # It has to lie inside of its memory.
    if not all(isinstance(number, int) and number >= 0 for number in (first, *shape, *strides)):
        raise ValueError("a tensor of another shape than there is")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    end = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if max(end + 1, math.prod(shape)) * dtype.itemsize > len(memory):
        raise ValueError("a tensor lies outside of its memory")
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, first)


class _Plain(pickle._Unpickler):
    """Builds what DCP and `torch.save` write of plain values, names and objects without methods.

    It is the one in Python: that in C makes room for as many objects as a pickle says it has, gigabytes if it says so.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _OBJECTS.get(module, ()):
            return type(name, (_Object,), {})  # a class of its own, whatever is done to it
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"refused: it asks for {module}.{name}, which no checkpoint does; nothing was run")

    def persistent_load(self, pid: Any) -> Any:
        return pid  # ("storage", its dtype, its file, its device, its length)


class _Object:
    """Any object that DCP writes: what it was made with, and its fields."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, fields: Any) -> None:
        if isinstance(fields, dict):
            self.__dict__.update(fields)


_VALUES: dict[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _storage_type_to_dtype_map().items() if name[0] != "Q"},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
}
