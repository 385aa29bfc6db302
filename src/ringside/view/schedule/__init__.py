"""view/schedule/__init__.py"""
