"""predict/tables/__init__.py"""
