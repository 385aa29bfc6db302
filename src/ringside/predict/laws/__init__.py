"""predict/laws/__init__.py"""
