"""monitor/links/__init__.py"""
