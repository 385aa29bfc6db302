"""doctor/files/__init__.py"""
