"""doctor/replay/__init__.py"""
