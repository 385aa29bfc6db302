"""monitor/step_clock/__init__.py"""
