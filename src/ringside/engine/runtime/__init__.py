"""engine/runtime/__init__.py"""
