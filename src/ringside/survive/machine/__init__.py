"""The parts of the state machine that `protocol.py` describes.

`member.py` is the machine: an event goes to its handler, and what is unanswered is asked again. `standing.py` is what a
member knows. The handlers are functions of a standing, one concept a file: `entering` generations, the `working` of a
step, `voting` on its result, `deciding`, `membership`, `joining`, and how it comes to an `ending`.
"""
