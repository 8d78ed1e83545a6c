"""The jobs, a module each: pure functions from DataFrames to DataFrames, and a `JOB` naming what goes in and out."""
