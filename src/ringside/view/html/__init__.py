"""Pages that are one file.

charts       Charts: lines over training steps, and over sizes, hosts or buckets
doctor       The doctor's findings as one HTML page that needs nothing else: verdicts first, lanes, rings, tables
markup       HTML whose texts are escaped because there is no other way to put them in
page         The shell of every page that is one self-contained file, and the sections that several of them have
predictions  The predictor's answers as pages: a plan, the answer of a what-if, and scores of predictions beside
             measurements
rings        Ranks on a circle: who waited for whom, and a communicator's rings and trees by what every hop travels over
run_report   A run's report: one HTML file that needs nothing else, the verdict first
simulation   A simulated schedule as a page: its chunks under way in simulated time, a lane per rank, and what it waited
             for
"""
