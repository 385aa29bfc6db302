"""view/run/__init__.py"""
