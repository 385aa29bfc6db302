"""survive/all_reduce/__init__.py"""
