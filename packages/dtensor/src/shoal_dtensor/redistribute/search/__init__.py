"""Which plan is cheapest: the states between two layouts, the moves between them, and the search.

May import: reductions, step_cost.
"""
