"""The report page: words, tables and pictures of a :class:`~lightning_mp.report.story.Story`, in one HTML file."""
