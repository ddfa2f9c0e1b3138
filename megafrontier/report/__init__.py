"""What runs did, as pictures and one HTML page, from the files that they left."""

from megafrontier.report.page import write_report

__all__ = ["write_report"]
