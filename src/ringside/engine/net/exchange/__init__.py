"""engine/net/exchange/__init__.py"""
