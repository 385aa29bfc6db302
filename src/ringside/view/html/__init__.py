"""view/html/__init__.py"""
