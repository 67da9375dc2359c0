"""Eight exercises on routing: python -m lab"""
