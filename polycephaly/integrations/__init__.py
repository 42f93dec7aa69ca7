"""Polycephaly inside Jupyter and IPython."""
