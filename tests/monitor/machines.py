"""Machines to read vitals from: trees of the kernel's files as they are written on real ones, and a GPU's driver."""

from __future__ import annotations

from pathlib import Path

V2_MOUNT = "29 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 25 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


class Machine:
    """A tree that stands for `/`, with time of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.time, self.cost = root, 100.0, 0.0

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def thread(self, tid: int, ran_s: float, waited_s: float) -> None:
        self.write(f"proc/self/task/{tid}/schedstat", f"{round(ran_s * 1e9)} {round(waited_s * 1e9)} 12\n")

    def cpu(self, busy: int, stolen: int, *, count: int = 2) -> None:
        """Ticks of cpu0; the other CPUs are idle and nothing is stolen from them."""
        rows = [f"cpu{n} {busy if n == 0 else 0} 0 0 500 0 0 0 {stolen if n == 0 else 0} 0 0" for n in range(count)]
        self.write("proc/stat", "\n".join([f"cpu  {busy} 0 0 {500 * count} 0 0 0 {stolen} 0 0", *rows, "intr 1 2 3\n"]))

    def lives_in(self, cgroup: str, *, version: int = 2, mounted: str = "/") -> None:
        line = f"0::{cgroup}\n" if version == 2 else f"4:memory:/elsewhere\n3:cpu,cpuacct:{cgroup}\n0::/other\n"
        self.write("proc/self/cgroup", line)
        self.write("proc/self/mountinfo", (V2_MOUNT if version == 2 else V1_MOUNT).format(root=mounted))

    def quota_v2(self, path: str, bound: str, throttled_s: float) -> None:
        self.write(f"sys/fs/cgroup/{path}/cpu.max", bound + "\n")
        lines = f"usage_usec 77\nnr_periods 10\nnr_throttled 4\nthrottled_usec {round(throttled_s * 1e6)}\n"
        self.write(f"sys/fs/cgroup/{path}/cpu.stat", lines)

    def quota_v1(self, path: str, quota_us: int, throttled_s: float) -> None:
        self.write(f"sys/fs/cgroup/cpu,cpuacct/{path}/cpu.cfs_quota_us", f"{quota_us}\n")
        self.write(f"sys/fs/cgroup/cpu,cpuacct/{path}/cpu.cfs_period_us", "100000\n")
        lines = f"nr_periods 10\nnr_throttled 4\nthrottled_time {round(throttled_s * 1e9)}\n"
        self.write(f"sys/fs/cgroup/cpu,cpuacct/{path}/cpu.stat", lines)


class NVMLError(Exception):
    """As in pynvml."""


class Nvml:
    """NVML with one H100, as far as the monitor asks: the functions and constants of pynvml, and its errors.

    Args:
        refused: Functions that this GPU does not support.
    """

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        self.refused = refused
        self.clock, self.celsius, self.milliwatts, self.reasons = 1110, 88, 412_345, 0x20 | 0x4
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1b2c":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return self._answer("nvmlDeviceGetMaxClockInfo", kind, self.NVML_CLOCK_SM, 1980)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self._answer("nvmlDeviceGetClockInfo", kind, self.NVML_CLOCK_SM, self.clock)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self._answer("nvmlDeviceGetTemperature", sensor, self.NVML_TEMPERATURE_GPU, self.celsius)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._answer("nvmlDeviceGetPowerUsage", 0, 0, self.milliwatts)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return self._answer("nvmlDeviceGetEnforcedPowerLimit", 0, 0, 700_000)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._answer("nvmlDeviceGetCurrentClocksEventReasons", 0, 0, self.reasons)

    def _answer(self, name: str, asked: int, right: int, value: int) -> int:
        assert asked == right, f"{name} was asked for {asked}"
        if name in self.refused:
            raise NVMLError("Not Supported")
        return value


class OlderNvml(Nvml):
    """A module from before throttle reasons were renamed to event reasons."""

    def __getattribute__(self, name: str) -> object:
        if name == "nvmlDeviceGetCurrentClocksEventReasons":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons
