"""pytorch/communicator/__init__.py"""
