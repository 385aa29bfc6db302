"""The few lines of metadata beside a pipeline timeline: how many replicas, stages and model chunks there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ringside.errors import UsageError

_LINE = re.compile(r"""^\s*["']?(\w+)["']?\s*:\s*["']?([^"'#,}]*?)["']?\s*,?\s*(?:#.*)?$""")
LARGEST = 1 << 24
ALIASES = {
    "dp_size": ("dp", "data_parallel_size"),
    "pp_size": ("pp", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "tp_size": ("tp", "tensor_parallel_size", "tensor_model_parallel_size"),
    "dsp_size": ("dsp", "cp_size", "context_parallel_size"),
    "vpp_size": ("vpp", "virtual_pipeline_model_parallel_size"),
}
"""Other names of the sizes: Megatron's."""


@dataclass(frozen=True)
class Meta:
    """How a job was laid out.

    Args:
        trial_name: The job's name.
        dp_size: Data-parallel replicas.
        pp_size: Pipeline stages.
        tp_size: Ranks that share one worker's tensors.
        dsp_size: Ranks that share one sequence.
        vpp_size: Model chunks per stage (interleaving).
        world_size: Ranks; 0 where not given.
    """

    trial_name: str = ""
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    dsp_size: int = 1
    vpp_size: int = 1
    world_size: int = 0

    @property
    def ranks_per_worker(self) -> float:
        """Ranks per worker of the timeline (a worker is one stage of one replica)."""
        workers = self.dp_size * self.pp_size
        return self.world_size / workers if self.world_size else float(self.tp_size * self.dsp_size)


def looks_like_meta(head: bytes) -> bool:
    """Return whether a file's first bytes are such metadata: `dp_size` and `pp_size` on lines of their own."""
    if head.lstrip()[:1] == b"[" or b"traceEvents" in head or b'"step_t_base"' in head:
        return False
    return {"dp_size", "pp_size"} <= _fields(head.decode("utf-8", "replace")).keys()


def parse_meta(text: str) -> Meta:
    """Return the metadata in a text of `name: value` lines (flat YAML).

    Raises:
        UsageError: A size is no positive whole number, or the sizes contradict each other.
    """
    found = _fields(text)
    sizes = {name: _size(name, found) for name in ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size")}
    world = _size("world_size", found) if "world_size" in found else 0
    expected = sizes["dp_size"] * sizes["pp_size"] * sizes["tp_size"] * sizes["dsp_size"]
    if world and world != expected:
        raise UsageError(
            f"world_size is {world}, but dp_size · pp_size · tp_size · dsp_size is {expected}: correct the metadata"
        )
    return Meta(trial_name=found.get("trial_name", ""), world_size=world, **sizes)


def _fields(text: str) -> dict[str, str]:
    """The `name: value` lines of a text, by our names; a mapping in braces (JSON, or YAML's flow) counts as lines."""
    if text.lstrip()[:1] == "{":
        text = text.replace("{", "\n").replace("}", "\n").replace(",", "\n")
    short = [line for line in text.splitlines() if len(line) < 200]
    found = {match[1]: match[2].strip() for match in map(_LINE.match, short) if match}
    for name, others in ALIASES.items():
        for other in others:
            if name not in found and found.get(other, "null") not in ("null", "None", "~", ""):
                found[name] = found[other]
    return found


def _size(name: str, found: Mapping[str, str]) -> int:
    text = found.get(name, "1")
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise UsageError(f"{name} is {text!r} in the metadata; it is a whole number of at least 1")
    return int(text)
