"""The doctor: what happened in the run that already failed or crawled, read from the files it left behind.

`sources` walks paths, archives and compressed files; every reader recognises its kind from the content and turns all
files of its kind into `Findings`; `examine` puts them together. No torch, and nothing found in a file is ever executed.
"""

from ringside.doctor.examine import Reader, examine
from ringside.doctor.files.source import Limits, Source
from ringside.doctor.files.walk import gather
from ringside.doctor.findings import Findings, Note, Question, Unjudged, as_json

__all__ = ["Findings", "Limits", "Note", "Question", "Reader", "Source", "Unjudged", "as_json", "examine", "gather"]
