"""Observation of an unchanged program on one rank, by hooks on all parts of its training.

The parts are modules, backwards, optimizers, dropout and data loaders.

May import: records.
"""
