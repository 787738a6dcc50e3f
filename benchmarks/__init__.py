"""Figures of the project beside those of plain CRIU and stock Jupyter, taken in one run."""
