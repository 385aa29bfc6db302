"""survive/data/__init__.py"""
