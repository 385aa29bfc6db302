"""predict/score/__init__.py"""
