"""Python imports this at start-up because `ringside run` put its directory on PYTHONPATH.

It first does what the `sitecustomize` that it hides would have done. It must never break a process: it is imported by
everything that the script starts, also by Pythons that have no Ringside.
"""

import os
import sys


def _run_hidden_sitecustomize() -> None:
    """Import the `sitecustomize` that would have been imported without this one."""
    import importlib.util
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    # Only the ranks: torchrun itself, and what it starts beside them, pays nothing.
    if os.environ.get("RINGSIDE_AUTOLOAD") == "1" and "RANK" in os.environ:
        from ringside.autoload.ringside_autoload import install

        install()
except Exception as error:
    print(f"ringside: this process is not watched ({type(error).__name__}: {error})", file=sys.stderr)
_run_hidden_sitecustomize()
