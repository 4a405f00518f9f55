"""What an audit found, as a page to keep and to hand on.

``audit`` lays the page out, ``wording`` says in words what was and what could not be seen, and
``pictures`` draws the laws.
"""
