"""survive/state/__init__.py"""
