"""What is installed here: what an issue needs to know of it, and whether somebody else's package lies in ours.

Our distribution is `torch-ringside`. The one that is called `ringside` on PyPI is somebody else's, with a module and a
command of that name: pip lets the later one overwrite files of the earlier one, and says nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parent


def warn_of_namesake() -> None:
    """Log one sentence if the other `ringside` is installed over this one, or below it.

    It is one listing of the directory that holds the package, a fraction of a millisecond: `import ringside` can pay
    it, and cannot pay importlib.metadata.
    """
    try:
        beside = os.listdir(PACKAGE.parent)
    except OSError:  # a package in a zip file, or a directory that only the importer may read
        return
    metadata = [name for name in beside if name.startswith("ringside-") and name.endswith((".dist-info", ".egg-info"))]
    if metadata:
        import logging

        logging.getLogger("ringside").warning(
            "another package called ringside (%s) is installed in %s and shares files with torch-ringside: run "
            "`pip uninstall ringside torch-ringside`, then install torch-ringside again",
            metadata[0].rsplit(".", 1)[0],
            PACKAGE.parent,
        )


def describe() -> str:
    """Return what an issue needs: versions, platform, and which native core is used; a line for each."""
    import platform
    import sys

    from ringside import _core
    from ringside._version import __version__

    try:
        from importlib.metadata import PackageNotFoundError, version

        torch = version("torch")  # importing it takes seconds
    except PackageNotFoundError:
        torch = "not installed"
    libc = " ".join(platform.libc_ver())
    return "\n".join(
        (
            f"ringside {__version__}",
            f"torch    {torch}",
            f"python   {platform.python_version()} ({sys.executable})",
            f"platform {platform.system()} {platform.release()} {platform.machine()}, {libc or 'unknown C library'}",
            f"core     {_core.build()}",
        )
    )
