"""doctor/pipeline/__init__.py"""
