"""view/server/__init__.py"""
