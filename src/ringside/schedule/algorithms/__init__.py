"""schedule/algorithms/__init__.py"""
