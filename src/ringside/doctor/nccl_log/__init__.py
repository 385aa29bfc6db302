"""doctor/nccl_log/__init__.py"""
