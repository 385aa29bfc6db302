"""engine/shm/__init__.py"""
