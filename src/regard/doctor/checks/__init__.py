"""Checks of training text, one in each file. `regard.doctor.tables` lists them."""
