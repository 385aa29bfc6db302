"""predict/simulation/__init__.py"""
