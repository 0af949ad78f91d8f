"""HTML reports, charts, traces and videos of a run."""
