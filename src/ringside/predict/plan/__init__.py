"""predict/plan/__init__.py"""
