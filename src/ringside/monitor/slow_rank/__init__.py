"""monitor/slow_rank/__init__.py"""
