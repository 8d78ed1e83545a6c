"""What every package uses of the process and its reactor: clocks, deadlines, periodic tasks, logs, secret files."""
