"""monitor/run/__init__.py"""
