"""monitor/alerts/__init__.py"""
