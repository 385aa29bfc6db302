"""How well predictions of tables hold that were not fitted.

baselines  What a prediction must be better than: one Hockney line, interpolation, and NCCL's own constants used as a
           timer
score      How well predictions meet tables of measurements: hold-out, larger sizes, another scale, no fit at all
"""
