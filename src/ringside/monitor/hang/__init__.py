"""monitor/hang/__init__.py"""
