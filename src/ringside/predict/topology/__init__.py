"""predict/topology/__init__.py"""
