"""The local computation of each module type, with explicit collectives."""
