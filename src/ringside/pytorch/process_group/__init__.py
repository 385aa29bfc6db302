"""pytorch/process_group/__init__.py"""
