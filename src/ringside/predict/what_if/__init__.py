"""predict/what_if/__init__.py"""
