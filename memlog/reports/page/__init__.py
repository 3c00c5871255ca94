"""A run's report: one HTML file that opens anywhere, offline.

`html` makes the page of a run, `comparison_html` the page of two runs. All text and tables are in the HTML; a
script makes the charts zoomable. A Content-Security-Policy in the page forbids loading and sending anything.
"""

from memlog.reports.page.page import comparison_html, html

__all__ = ["comparison_html", "html"]
