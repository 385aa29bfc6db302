"""A worker of a job, as far as can be seen from outside; with `left` it has left."""

from __future__ import annotations

import os
import sys

from ringside.survive.cluster.peers import PeerMark

mark = PeerMark()
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
child = os.fork()
if not child:
    sys.stdin.read()  # a DataLoader's worker: it has all descriptors of the rank
    os._exit(0)
if "left" in sys.argv:
    mark.close()
print(child, flush=True)
sys.stdin.read()
os.waitpid(child, 0)
