"""pytorch/hang_watch/__init__.py"""
