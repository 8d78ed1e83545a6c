"""
`mediatord bench`: throughput, latency and memory of a mediator on this machine.

Every figure stands beside a baseline measured in the same run and interleaved with it, because absolute numbers
depend more on the machine and its load than on the program. See docs/explanation/performance.md.
"""
