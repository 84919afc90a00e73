"""Observation of an unchanged program on one rank: hooks on modules, backwards, optimizers, dropout and data loaders.

May import: records.
"""
