"""survive/cluster/__init__.py"""
