"""Reading log segments: files, discovery of segments, parsing into the table `events`."""
