"""A run for other programs: Perfetto, Markdown, Prometheus.

markdown    A run's report as Markdown, for pull requests and job summaries: the verdict first
perfetto    A run as a trace that Perfetto and chrome://tracing open: phases per rank, and arrows from whom all waited
            for
prometheus  A run's figures as Prometheus metrics: base units, and never more labels than a bounded number of ranks and
            kinds
"""
