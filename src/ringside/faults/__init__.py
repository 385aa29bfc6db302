"""faults/__init__.py"""
