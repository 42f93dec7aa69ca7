"""Support for Jupyter and IPython."""
