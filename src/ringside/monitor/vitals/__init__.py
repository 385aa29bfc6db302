"""monitor/vitals/__init__.py"""
