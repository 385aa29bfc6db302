"""engine/cost/__init__.py"""
