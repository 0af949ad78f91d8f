"""Parts of HTML pages: curves, timelines, tables and samples."""
