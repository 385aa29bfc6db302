"""pytorch/ddp/__init__.py"""
