"""Count words in a directory of text files that may grow while the flow runs.

anabranch run examples/wordcount.py --dir job --workers 2 --until-idle
anabranch output job counts
"""

from pathlib import Path

import anabranch as ab

LINES = Path(__file__).parent / "data" / "lines"

flow = ab.Flow("wordcount")
lines = flow.input("lines", ab.files(LINES, format="text"))
words = lines.flat_map(lambda line: line.lower().split())
counts = words.key_by("value").count()
counts.output("counts")
