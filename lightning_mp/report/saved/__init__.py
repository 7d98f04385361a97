"""Runs that were saved, in any form, read into a :class:`~lightning_mp.report.story.Story`."""
