"""monitor/job/__init__.py"""
