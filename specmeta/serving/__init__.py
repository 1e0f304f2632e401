"""The parts of an engine around specmeta: paged attention, the host's pages, the step."""
