"""engine/tuner/__init__.py"""
