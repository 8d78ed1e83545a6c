"""The report of a day: one HTML file, CSV files, a summary in JSON, and gauges for Prometheus."""
