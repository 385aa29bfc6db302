"""engine/net/__init__.py"""
