"""What is read of a GPU, from a driver that answers as NVML does."""

from __future__ import annotations

import pytest

from ringside.monitor.run.records import Vitals
from ringside.monitor.vitals.gpu import REASONS, NvmlGpu, name_reasons, open_gpu

from .machines import Nvml, NVMLError, OlderNvml


@pytest.mark.parametrize("make", [Nvml, OlderNvml])
@pytest.mark.parametrize("uuid", ["1b2c", "GPU-1b2c"])
def test_everything_a_gpu_tells(make: type[Nvml], uuid: str) -> None:
    nvml = make()
    gpu = NvmlGpu(nvml, uuid)
    known = gpu.read()
    assert known == {
        "gpu_clock_mhz": 1110.0,
        "gpu_max_clock_mhz": 1980.0,
        "gpu_celsius": 88.0,
        "gpu_watts": pytest.approx(412.345),
        "gpu_cap_watts": 700.0,
        "gpu_reasons": 0x24,
    }
    Vitals(seconds=1.0, **known)  # type: ignore[arg-type]
    nvml.clock = 1500
    assert gpu.read()["gpu_clock_mhz"] == 1500.0
    gpu.close()
    assert nvml.opened == 0


def test_what_a_gpu_does_not_support_is_absent() -> None:
    refused = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetCurrentClocksEventReasons")
    known = NvmlGpu(Nvml(refused), "1b2c").read()
    assert known == {"gpu_clock_mhz": 1110.0, "gpu_celsius": 88.0, "gpu_cap_watts": 700.0}


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(NVMLError):
        NvmlGpu(Nvml(), "ffff")
    assert open_gpu("00000000-0000-0000-0000-000000000000") is None  # with or without a driver on this machine


def test_reasons_in_words() -> None:
    assert name_reasons(0) == []
    assert name_reasons(0x1) == []  # idle
    assert name_reasons(0x4 | 0x20) == ["thermal slowdown", "power cap"]


def test_the_names_are_those_of_the_real_module() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    asked = [name for name in vars(Nvml) if name.startswith(("nvml", "NVML_"))]
    assert len(asked) > 8
    assert [name for name in asked if not hasattr(pynvml, name)] == []
    assert hasattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    for name in ("NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU"):
        assert getattr(pynvml, name) == getattr(Nvml, name)
    theirs = {
        getattr(pynvml, f"nvmlClocksThrottleReason{name}")
        for name in (
            *("ApplicationsClocksSetting", "SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown"),
            *("HwThermalSlowdown", "HwPowerBrakeSlowdown", "DisplayClockSetting"),
        )
    }
    assert theirs == set(REASONS)
