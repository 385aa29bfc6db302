"""monitor/causes/__init__.py"""
