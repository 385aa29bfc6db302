"""view/export/__init__.py"""
