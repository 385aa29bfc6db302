"""DDP's buckets in memory that the host's ranks map, from the moment when DDP makes them.

DDP's reducer makes a bucket by `at::empty`, in C++, and a dispatch mode of Python's sees that: while the reducer is
made, or makes its buckets anew after the first backward, it is given memory of ours. All of DDP's views lie in it, and
so do gradients that are views of buckets; they live as long as they would without us.

`Reducer._rebuild_buckets` is where that happens in every forward pass, and for a rank that has joined (DDP's Join) too,
so that is what is wrapped, for the class. A model bears no mark of it: it is copied and pickled as ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Reducer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ringside.engine.dtypes import FLOATING
from ringside.pytorch.shared_storage import empty_shared, warn_copied


class BucketsShared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, the buckets that a reducer makes on this thread can be mapped by peers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a bucket; whatever else comes along is done as ever."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            is_local = (kwargs.get("device") or torch.device("cpu")).type == "cpu"
            if is_local and len(args[0]) == 1 and args[0][0] > 0 and str(dtype).removeprefix("torch.") in FLOATING:
                return empty_shared(args[0][0], dtype)
        return func(*args, **kwargs)


_to_share: weakref.WeakSet[Any] = weakref.WeakSet()
"""Reducers whose next rebuilt buckets are to be shared."""
_to_rebuild: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[DistributedDataParallel], Callable[[], int], int]]
_to_rebuild = weakref.WeakKeyDictionary()
"""Reducers that are to rebuild their buckets once more: whose they are, and the backward passes so far and before."""
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def share_buckets(model: DistributedDataParallel, backwards: Callable[[], int]) -> None:
    """See to it that a model's buckets come to lie in memory that peers can map, as far as nobody can notice.

    - Buckets that DDP is going to rebuild, after the first backward, are shared then.
    - A model that has not run yet and rebuilds nothing (`find_unused_parameters=True`) gets a new reducer.
    - One that has run rebuilds its buckets once more, unless gradients are views of them: what the script holds of
      those (an array, an address) has to stay what it is, so these buckets are copied for as long as they live.
      So are those of a reducer that would forget which parameters were used.

    All ranks must call this at the same point: making buckets anew is a collective.

    Args:
        model: The model.
        backwards: Tells how many backward passes there were: the same number on all ranks.
    """
    if model.reducer in _known:
        return
    stays = model.gradient_as_bucket_view or model.static_graph
    rebuilds = model.static_graph or not model.find_unused_parameters
    if (stays and model._has_rebuilt_buckets) if rebuilds else model._lazy_init_ran:
        if torch.distributed.get_rank() == 0:
            warn_copied("attach(model) came after the model's first steps; call it before them")
    elif rebuilds:
        if not stays:
            # Also where nothing was rebuilt yet: a rank that had no batch so far (Join) could not tell.
            _to_rebuild[model.reducer] = weakref.ref(model), backwards, backwards()
        _wrap_rebuilding()
        _to_share.add(model.reducer)
    elif not model._get_ddp_logging_data().get("comm_hook"):  # type: ignore[no-untyped-call]
        # As DDP does when a model is unpickled.
        parameters, sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        with BucketsShared():
            model._ddp_init_helper(parameters, sparse, names, model.static_graph)  # type: ignore[no-untyped-call]
    _known.add(model.reducer)


def make_reducer(model: DistributedDataParallel, make: Callable[[], None], static_graph: bool) -> None:
    """Give a model a reducer whose buckets peers can map as soon as they are there to stay.

    Args:
        model: The model.
        make: Makes `model.reducer`.
        static_graph: DDP's: the same parameters are used in every step.
    """
    if static_graph or not model.find_unused_parameters:
        make()
        _wrap_rebuilding()
        _to_share.add(model.reducer)
    else:
        with BucketsShared():
            make()
    _known.add(model.reducer)


@functools.cache
def _wrap_rebuilding() -> None:
    reducer: Any = Reducer
    rebuild = reducer._rebuild_buckets

    @functools.wraps(rebuild)
    def rebuild_shared(self: Any) -> bool:
        if self not in _to_share:
            return bool(rebuild(self))
        with BucketsShared():
            rebuilt = bool(rebuild(self))  # which also tells of a backward that did not use all parameters
        if rebuilt:
            _to_share.discard(self)
            _to_rebuild.pop(self, None)
        elif self in _to_rebuild:
            of_model, backwards, before = _to_rebuild[self]
            model = of_model()
            # After a backward, not before one whose forward came before all this: its gradients would not be reduced.
            if model is not None and model.require_backward_grad_sync and backwards() > before:
                del _to_rebuild[self]
                self._reset_state()
        return rebuilt

    reducer._rebuild_buckets = rebuild_shared
