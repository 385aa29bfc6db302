"""doctor/kineto/__init__.py"""
