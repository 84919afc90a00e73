"""Which plan is cheapest: the states between two layouts, the edges between them with their cost, and the search.

May import: steps.
"""
