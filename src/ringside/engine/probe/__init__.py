"""engine/probe/__init__.py"""
