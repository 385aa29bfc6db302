"""A live view of a run in a notebook: the public path of `ringside.view.notebook`."""

from ringside.view.notebook import LiveView

__all__ = ["LiveView"]
