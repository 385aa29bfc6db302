"""doctor/flight_recorder/__init__.py"""
