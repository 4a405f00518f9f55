"""What was found and measured, as pages to keep and to hand on.

``audit`` and ``bench`` lay pages out, ``wording`` and ``verdicts`` say in words what was found,
``pictures``, ``gallery`` and ``bench_pictures`` draw, ``figures`` has the numbers behind a
benchmark's pictures, and ``page`` and ``svg`` are what they share.
"""
