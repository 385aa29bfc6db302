"""pytorch/recording/__init__.py"""
