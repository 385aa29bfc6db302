"""view/tui/__init__.py"""
