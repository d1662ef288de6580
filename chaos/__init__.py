"""Random flows under random faults, each step checked against plain Python.

`flows` draws a flow, `feed` its growing inputs, `build` makes an Anabranch flow of it, and `oracle` says what each
step of it must give.  `job` runs the command as users do, `actions` does the harm, `check` compares, `run` has the
rounds.  What judges (`oracle`, `records`, `check`) imports nothing of Anabranch.
"""
