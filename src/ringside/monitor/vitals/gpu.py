"""How a GPU does, from NVIDIA's management library: its clock, and why that is no higher; its temperature and power.

Needs `pip install 'torch-ringside[gpu]'` (nvidia-ml-py). Without it, without a driver, or on a GPU that does not
answer a question (a slice of one, a card without a power sensor), what is missing is simply absent.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

REASONS = {
    0x008: "hardware slowdown (heat, or a power fault)",
    0x020: "thermal slowdown",
    0x040: "thermal slowdown by the hardware",
    0x080: "power brake by the machine's power supply",
    0x004: "power cap",
    0x010: "limited to the clock of the GPUs it is synchronised with",
    0x002: "its clocks were set by hand",
    0x100: "display clocks",
}
"""What keeps a GPU's clock down: NVML's bits of clocks event reasons, those that harm most first."""

HOT = 0x008 | 0x020 | 0x040
CAPPED = 0x004 | 0x080
SET = 0x002 | 0x010 | 0x100
IDLE = 0x001

_log = logging.getLogger(__name__)


class NvmlGpu:
    """Reads one GPU through NVML.

    Args:
        nvml: The module `pynvml`, or what has the same functions.
        uuid: The GPU, as NVML or PyTorch writes it.

    Raises:
        Exception: NVML's own error: no driver, no such GPU.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(name)
        self._most_mhz = self._number(lambda: nvml.nvmlDeviceGetMaxClockInfo(self._gpu, nvml.NVML_CLOCK_SM))
        # NVIDIA renamed throttle reasons to event reasons; an older module knows only the first name.
        newer = hasattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons")
        self._reasons = (
            "nvmlDeviceGetCurrentClocksEventReasons" if newer else "nvmlDeviceGetCurrentClocksThrottleReasons"
        )

    def read(self) -> dict[str, float | int]:
        """Return the fields of `Vitals` that begin with `gpu_`, as far as this GPU reports them."""
        nvml, gpu = self._nvml, self._gpu
        known: dict[str, float | None] = {
            "gpu_clock_mhz": self._number(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            "gpu_max_clock_mhz": self._most_mhz,
            "gpu_celsius": self._number(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            "gpu_watts": self._number(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            "gpu_cap_watts": self._number(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3),
        }
        if (reasons := self._number(lambda: getattr(nvml, self._reasons)(gpu))) is not None:
            known["gpu_reasons"] = int(reasons)
        return {name: value for name, value in known.items() if value is not None}

    def close(self) -> None:
        """Release NVML."""
        self._number(self._nvml.nvmlShutdown)

    def _number(self, ask: Callable[[], Any]) -> float | None:
        """Return an answer; None where this GPU or its driver has none (NVML has an error for each reason)."""
        try:
            answer = ask()
        except Exception:
            return None
        return float(answer) if isinstance(answer, int | float) else None


def open_gpu(uuid: str) -> NvmlGpu | None:
    """Return the GPU with that identifier; None, logged at debug level, where NVML cannot be read."""
    try:
        return NvmlGpu(importlib.import_module("pynvml"), uuid)
    except Exception as error:
        _log.debug("the GPU's clocks are not watched: %s: %s", type(error).__name__, error)
        return None


def name_reasons(bits: int) -> list[str]:
    """Return in words what keeps a GPU's clock down, what harms most first; empty where it is idle or nothing does."""
    return [words for bit, words in REASONS.items() if bits & bit]
