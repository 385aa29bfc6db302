"""schedule/proof/__init__.py"""
