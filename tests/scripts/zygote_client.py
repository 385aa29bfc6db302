"""Stands for Python where a test starts a program: has it forked, and ends as it does (`tests/support/zygote.py`)."""

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def is_inherited(descriptor):
    try:
        return descriptor > 2 and os.get_inheritable(descriptor)
    except OSError:  # that of the listing itself
        return False


words = sys.argv[1:]
if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m", "-u")):
    os.execv(sys.executable, [sys.executable, *words])
inherited = [*range(3), *filter(is_inherited, map(int, os.listdir("/proc/self/fd")))]
zygote = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
zygote.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
program = {"words": words, "directory": os.getcwd(), "environ": dict(os.environ), "client": os.getpid()}
socket.send_fds(zygote, [json.dumps({**program, "inherited": inherited}).encode()], inherited)
pid = int(zygote.recv(64))


def pass_on(signum, _):
    with contextlib.suppress(ProcessLookupError):  # it ends this moment
        os.kill(pid, signum)


for number in PASSED_ON:
    signal.signal(number, pass_on)
status = int(zygote.recv(64))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
