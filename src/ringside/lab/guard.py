"""A process beside every lab that waits for the lab's owner to die, and then removes the lab.

It covers every way a process can end without cleaning up: SIGKILL, SIGTERM without a handler, the OOM killer, a crash.
Should it be killed as well, the next lab that starts removes what is left (`remove_leftovers`).
"""

from __future__ import annotations

import select
import subprocess
import sys

from ringside.lab.names import LabName
from ringside.lab.namespaces import remove
from ringside.processes import hold


def start_guard(lab: LabName) -> subprocess.Popen[bytes]:
    """Start the guard of a lab that this process is about to build; it is to be killed once the lab is removed."""
    words = [str(number) for number in (lab.pid, lab.start, lab.count)]
    # In a session of its own: Ctrl-C at the terminal is for the owner.
    return subprocess.Popen(
        [sys.executable, "-m", "ringside.lab.guard", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(words: list[str]) -> None:
    """Wait for the owner to end, then remove its lab."""
    pid, start, count = map(int, words)
    lab = LabName(pid, start, count)
    owner = hold(pid)
    if owner is not None and lab.owner_lives():
        select.select([owner], [], [])
    remove(lab)


if __name__ == "__main__":
    main(sys.argv[1:])
