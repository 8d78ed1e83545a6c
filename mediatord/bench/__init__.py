"""
`mediatord bench`: how fast this machine runs the mediator, and how fast it could.

Every figure stands beside a floor that was measured in the same run, interleaved with it, because absolute numbers
say more about the machine and its neighbours than about the program. docs/performance.md explains how to read them.
"""
