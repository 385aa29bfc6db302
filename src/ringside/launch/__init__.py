"""launch/__init__.py"""
