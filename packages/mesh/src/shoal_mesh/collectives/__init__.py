"""Collectives over one or several mesh axes: any dtype, any sizes, called straight on the process group."""
